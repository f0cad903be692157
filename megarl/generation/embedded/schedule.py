"""Continuous batching: who decodes when.

Jobs with the same sequence are neighbours in the line, so it is prefilled once and its keys and values are copied to
the other rows. If a group does not fit into the free slots at once, its sequence is kept in a row of its own (the last
of the pool) until the rest of the group is admitted: no more than one group can be in that state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from megarl.generation.embedded.decoder import Decoder
from megarl.generation.embedded.job import Job
from megarl.generation.embedded.kv_pool import KvPool
from megarl.generation.embedded.rounding import MIN_ROWS
from megarl.generation.embedded.rows import Rows
from megarl.generation.embedded.sampler import sample
from megarl.generation.embedded.waiting import Queued, WaitingLine


def num_pool_rows(num_slots: int) -> int:
    """Rows that the pool needs: the slots, and one for the prompt of a group that is not fully admitted."""
    return max(num_slots, MIN_ROWS) + 1


class Ended(NamedTuple):
    """A job that drew its last token. ``is_finite``: whether all its log-probs are."""

    job: Job
    is_finite: bool


class Schedule:
    """All jobs of an engine, from the line through the rows to their end. Not thread-safe."""

    def __init__(self, decoder: Decoder, pool: KvPool, num_slots: int) -> None:
        self._decoder = decoder
        self._pool = pool
        self._num_slots = num_slots
        self._rows = Rows(num_slots, pool.num_rows, pool.num_positions, pool.keys.device)
        self._line = WaitingLine()
        self._kept_row = pool.num_rows - 1
        # The group whose sequence is in the kept row, and the logits after it.
        self._kept: tuple[Queued, torch.Tensor] | None = None

    @property
    def num_running(self) -> int:
        """Jobs that hold a row."""
        return self._rows.num_active

    @property
    def num_waiting(self) -> int:
        """Jobs that stand in the line."""
        return len(self._line)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self._rows.num_active and not self._line

    def add(self, jobs: Iterable[Job]) -> None:
        """Let these jobs wait for a row."""
        self._line.add(jobs)

    def step(self) -> list[Ended]:
        """Draw one token for every row, those that have just become free included."""
        rows = self._rows
        logits = self._decode() if rows.num_active else None
        if self._line and rows.num_active < self._num_slots:
            first_logits = self._admit()
            logits = first_logits if logits is None else torch.cat([logits, first_logits])
        if logits is None:
            return []
        tokens, logprobs = sample(logits, rows.draw(), rows.needs)
        finished, broken = rows.record(tokens, logprobs)
        ended = []
        for row in finished:
            if row in broken:
                self._pool.clear(row, row + 1)
            ended.append(Ended(self._remove(row), row not in broken))
        if broken:
            # Copies of what broke, and rows that are decoded only to fill up the batch, may hold NaN as well.
            self._kept = None
            self._pool.clear(rows.num_active, self._pool.num_rows)
        return ended

    def remove(self, is_wanted: Callable[[Job], bool]) -> list[Job]:
        """Take jobs out, with what they have drawn."""
        waiting = self._line.remove(is_wanted)
        rows = [row for row in reversed(range(self._rows.num_active)) if is_wanted(self._rows.job(row))]
        return [self._remove(row) for row in rows] + waiting

    def retract(self) -> None:
        """Send the jobs of all rows back to the front of the line; their keys and values are lost."""
        self._kept = None
        retracted = [self._remove(row) for row in reversed(range(self._rows.num_active))]
        self._line.put_first(reversed(retracted))

    def note_version(self, version: int) -> None:
        """The weights of this version, which were served until now, have changed."""
        # Who has not begun begins with the new weights. Who has keeps its keys and values.
        self._kept = None
        self._rows.note_version(version)
        for job in self._line.jobs():
            if len(job.token_ids):
                job.changes.append((version, len(job.token_ids)))

    def _remove(self, row: int) -> Job:
        job, moved, length = self._rows.remove(row)
        if moved != row:
            self._pool.copy_prefix(moved, [row], length)
        return job

    def _decode(self) -> torch.Tensor:
        tokens, positions = self._rows.next_inputs(MIN_ROWS)
        return self._decoder.decode(tokens, positions, self._rows.max_length)[: self._rows.num_active]

    def _admit(self) -> torch.Tensor:
        """Fill the free slots from the line; give the logits after the sequences, one row per admitted job."""
        first_row = self._rows.num_active
        entering = self._line.take(self._num_slots - first_row)
        rows_of: dict[Queued, list[int]] = {}
        for row, (job, group) in enumerate(entering, start=first_row):
            rows_of.setdefault(group, []).append(row)
            self._rows.admit(job)
        logits_of = self._fill_from_kept(rows_of)
        new = [group for group in rows_of if group not in logits_of]
        if new:
            new_logits = self._decoder.prefill([g.sequence for g in new], [rows_of[g][0] for g in new])
            for group, logits in zip(new, new_logits, strict=True):
                logits_of[group] = logits
                self._pool.copy_prefix(rows_of[group][0], rows_of[group][1:], len(group.sequence))
        self._keep_for_later(entering[-1][1], rows_of, logits_of)
        return torch.stack([logits_of[group] for _, group in entering])

    def _fill_from_kept(self, rows_of: dict[Queued, list[int]]) -> dict[Queued, torch.Tensor]:
        """The kept sequence, if it is among the entering ones, goes to their rows."""
        if self._kept is None or self._kept[0] not in rows_of:
            return {}
        group, logits = self._kept
        self._pool.copy_prefix(self._kept_row, rows_of[group], len(group.sequence))
        return {group: logits}

    def _keep_for_later(
        self, last: Queued, rows_of: dict[Queued, list[int]], logits_of: dict[Queued, torch.Tensor]
    ) -> None:
        """If more jobs of the last admitted group are in the line, its sequence must outlive the rows it is in."""
        if last.jobs and (self._kept is None or self._kept[0] is not last):
            self._pool.copy_prefix(rows_of[last][0], [self._kept_row], len(last.sequence))
        self._kept = (last, logits_of[last]) if last.jobs else None
