"""What the engine knows about the rows it is decoding.

A *row* is a place in the batch and in the KV pool; active rows are always the first ones, so the last of them moves
when another finishes. A *lane* is where a request's parameters and tokens are kept while it is active; it never moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.protocols import GenerationRequest
from megarl.core.sample import Finish
from megarl.generation.embedded.sampler import UNIFORMS_PER_TOKEN, Draw, uniforms

_NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that is done: its index in the call, and what was drawn."""

    request: int
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    finish: Finish


class Rows:
    """Active rows ``0 … num_active - 1``, sized once for all requests of a call."""

    def __init__(self, requests: Sequence[GenerationRequest], num_slots: int, num_rows: int, device: torch.device):
        self.num_active = 0
        self._requests = requests
        self._device = device
        self._width = max(request.params.max_new_tokens for request in requests)
        self._num_stops = max(len(request.params.stop_token_ids) for request in requests)
        # One tensor, so that a row moves in one operation.
        self._state = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self._tokens, self._positions, self._cursors, self._lanes = self._state
        # The same for what the host has to know without asking the device.
        self._host = np.zeros((4, num_rows), dtype=np.int64)
        self._host_lengths, self._host_left, self._host_lanes, self._host_requests = self._host
        self._free_lanes = list(range(num_slots))
        self._temperatures = torch.ones(num_slots, dtype=torch.float32, device=device)
        self._top_ps = torch.ones(num_slots, dtype=torch.float64, device=device)
        self._top_ks = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._stops = torch.full((num_slots, self._num_stops), _NO_TOKEN, device=device)
        self._uniforms = torch.zeros(num_slots * self._width, UNIFORMS_PER_TOKEN, dtype=torch.float64, device=device)
        self._drawn = torch.zeros(num_slots * self._width, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(num_slots * self._width, dtype=torch.float32, device=device)

    @property
    def max_length(self) -> int:
        """Tokens of the longest active row, the one to be decoded next included."""
        return int(self._host_lengths[: self.num_active].max())

    def admit(self, request: int) -> None:
        """Append a row for the request; its first token is drawn from the logits of the prompt."""
        lane, row, width = self._free_lanes.pop(), self.num_active, self._width
        length, params = len(self._requests[request].token_ids), self._requests[request].params
        state = torch.tensor([0, length - 1, lane * width, lane])
        self._state[:, row] = state.to(self._device)
        self._host[:, row] = length, params.max_new_tokens, lane, request
        self._temperatures[lane] = params.temperature
        self._top_ps[lane] = params.top_p
        self._top_ks[lane] = params.top_k
        if self._num_stops:
            missing = self._num_stops - len(params.stop_token_ids)
            self._stops[lane] = torch.tensor([*params.stop_token_ids, *[_NO_TOKEN] * missing]).to(self._device)
        numbers = torch.from_numpy(uniforms(self._requests[request].seed, params.max_new_tokens))
        self._uniforms[lane * width : lane * width + len(numbers)] = numbers.to(self._device)
        self.num_active += 1

    def draw(self) -> Draw:
        """How every active row draws its next token."""
        lanes = self._lanes[: self.num_active]
        return Draw(
            temperatures=self._temperatures[lanes],
            top_ps=self._top_ps[lanes],
            top_ks=self._top_ks[lanes],
            uniforms=self._uniforms[self._cursors[: self.num_active]],
        )

    def next_inputs(self, min_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn tokens and their positions. Rows beyond the active ones, up to ``min_rows``, hold leftovers."""
        num_rows = max(self.num_active, min_rows)
        return self._tokens[:num_rows], self._positions[:num_rows]

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> list[int]:
        """Keep one drawn token per active row; give the rows that are finished by it, the last first."""
        num_active = self.num_active
        cursors = self._cursors[:num_active]
        self._drawn.index_copy_(0, cursors, tokens)
        self._logprobs.index_copy_(0, cursors, logprobs)
        self._tokens[:num_active] = tokens
        self._state[1:3, :num_active] += 1
        self._host_lengths[:num_active] += 1
        self._host_left[:num_active] -= 1
        done = self._host_left[:num_active] == 0
        if self._num_stops:
            done |= self._stopped(tokens, self._lanes[:num_active]).cpu().numpy()
        return [int(row) for row in np.flatnonzero(done)[::-1]]

    def remove(self, row: int) -> tuple[Finished, int, int]:
        """Take a finished row out; the last active row takes its place.

        Gives what was drawn, which row has to move here, and that row's length. Rows must be removed from the last to
        the first.
        """
        _, left, lane, request = (int(value) for value in self._host[:, row])
        start = lane * self._width
        stop = start + self._requests[request].params.max_new_tokens - left
        token_ids = self._drawn[start:stop].cpu().numpy().copy()
        stopped = int(token_ids[-1]) in self._requests[request].params.stop_token_ids
        logprobs = self._logprobs[start:stop].cpu().numpy().copy()
        self._free_lanes.append(lane)
        self.num_active -= 1
        last = self.num_active
        length = int(self._host_lengths[last])
        if last != row:
            self._state[:, row] = self._state[:, last]
            self._host[:, row] = self._host[:, last]
        return Finished(request, token_ids, logprobs, "stop" if stopped else "length"), last, length

    def _stopped(self, tokens: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
        return (tokens[:, None] == self._stops[lanes]).any(dim=1)
