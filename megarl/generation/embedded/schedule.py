"""Continuous batching: who decodes when.

Requests with the same prompt are neighbours in the queue, so a prompt is prefilled once and its keys and values are
copied to the other rows. If a group does not fit into the free slots at once, its prompt waits in a row of its own (the
last of the pool) until the rest of the group is admitted: no more than one group can be in that state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.protocols import GenerationRequest
from megarl.generation.embedded.decoder import Decoder
from megarl.generation.embedded.kv_pool import KvPool
from megarl.generation.embedded.rounding import MIN_ROWS
from megarl.generation.embedded.rows import Finished, Rows
from megarl.generation.embedded.sampler import Needs, sample


def num_pool_rows(num_slots: int) -> int:
    """Rows that the pool needs: the slots, and one for the prompt of a group that is not fully admitted."""
    return max(num_slots, MIN_ROWS) + 1


class Schedule:
    """One call of generate, from its requests to their results."""

    def __init__(self, requests: Sequence[GenerationRequest], decoder: Decoder, pool: KvPool, num_slots: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._num_slots = min(num_slots, len(requests))
        self._rows = Rows(requests, self._num_slots, pool.num_rows, pool.keys.device)
        self._needs = Needs.of([request.params for request in requests])
        self._queue, self._prompts = _line_up(requests)
        self._waiting_row = pool.num_rows - 1
        # The prompt in the waiting row, and the logits after it.
        self._waiting: tuple[int, torch.Tensor] | None = None

    def run(self) -> list[Finished]:
        """Serve every request; results in the order in which they finish."""
        rows, finished = self._rows, []
        while self._queue or rows.num_active:
            logits = self._decode() if rows.num_active else None
            if self._queue and rows.num_active < self._num_slots:
                first_logits = self._admit()
                logits = first_logits if logits is None else torch.cat([logits, first_logits])
            assert logits is not None  # without active rows, the queue has just filled them
            tokens, logprobs = sample(logits, rows.draw(), self._needs)
            for row in rows.record(tokens, logprobs):
                done, moved, length = rows.remove(row)
                finished.append(done)
                if moved != row:
                    self._pool.copy_prefix(moved, [row], length)
        return finished

    def _decode(self) -> torch.Tensor:
        tokens, positions = self._rows.next_inputs(MIN_ROWS)
        return self._decoder.decode(tokens, positions, self._rows.max_length)[: self._rows.num_active]

    def _admit(self) -> torch.Tensor:
        """Fill the free slots from the queue; give the logits after the prompts, one row per admitted request."""
        first_row = self._rows.num_active
        entering = [self._queue.popleft() for _ in range(min(self._num_slots - first_row, len(self._queue)))]
        rows_of: dict[int, list[int]] = {}
        for row, (request, prompt) in enumerate(entering, start=first_row):
            rows_of.setdefault(prompt, []).append(row)
            self._rows.admit(request)
        logits_of = self._fill_from_waiting(rows_of)
        new = [prompt for prompt in rows_of if prompt not in logits_of]
        if new:
            new_logits = self._decoder.prefill([self._prompts[p] for p in new], [rows_of[p][0] for p in new])
            for prompt, logits in zip(new, new_logits, strict=True):
                logits_of[prompt] = logits
                self._pool.copy_prefix(rows_of[prompt][0], rows_of[prompt][1:], len(self._prompts[prompt]))
        self._keep_for_later(entering[-1][1], rows_of, logits_of)
        return torch.stack([logits_of[prompt] for _, prompt in entering])

    def _fill_from_waiting(self, rows_of: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """The waiting prompt, if it is among the entering ones, goes to their rows."""
        if self._waiting is None or self._waiting[0] not in rows_of:
            return {}
        prompt, logits = self._waiting
        self._pool.copy_prefix(self._waiting_row, rows_of[prompt], len(self._prompts[prompt]))
        return {prompt: logits}

    def _keep_for_later(self, last: int, rows_of: dict[int, list[int]], logits_of: dict[int, torch.Tensor]) -> None:
        """If more requests of the last admitted prompt are queued, its prompt must outlive the rows it is in."""
        is_needed = bool(self._queue) and self._queue[0][1] == last
        if is_needed and (self._waiting is None or self._waiting[0] != last):
            self._pool.copy_prefix(rows_of[last][0], [self._waiting_row], len(self._prompts[last]))
        self._waiting = (last, logits_of[last]) if is_needed else None


def _line_up(requests: Sequence[GenerationRequest]) -> tuple[deque[tuple[int, int]], list[NDArray[np.int64]]]:
    """The queue of (request, prompt) and the distinct prompts.

    What may take longest starts first, so that the end of the call is not one long row decoding alone.
    """
    groups: dict[bytes, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(np.asarray(request.token_ids, dtype=np.int64).tobytes(), []).append(index)

    def longest(indices: list[int]) -> tuple[int, int]:
        max_new_tokens = max(requests[index].params.max_new_tokens for index in indices)
        return max_new_tokens, len(requests[indices[0]].token_ids)

    ordered = sorted(groups.values(), key=longest, reverse=True)
    prompts = [np.asarray(requests[indices[0]].token_ids, dtype=np.int64) for indices in ordered]
    return deque((index, prompt) for prompt, indices in enumerate(ordered) for index in indices), prompts
