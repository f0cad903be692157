"""What the engine knows about the rows it is decoding.

A *row* is a place in the batch and in the KV pool; active rows are always the first ones, so the last of them moves
when another finishes. A *lane* is where a request's random numbers and tokens are kept while it is active; it never
moves.
"""

from __future__ import annotations

import numpy as np
import torch

from megarl.generation.embedded.job import Job
from megarl.generation.embedded.sampler import UNIFORMS_PER_TOKEN, Draw, Needs, uniforms

_NO_TOKEN = -1


class Rows:
    """Active rows ``0 … num_active - 1``. A lane has room for ``width`` new tokens."""

    def __init__(self, num_slots: int, num_rows: int, width: int, device: torch.device):
        self.num_active = 0
        self._device = device
        self._width = width
        self._jobs: list[Job] = []
        self._needs: Needs | None = None
        # On the device, what the decoder and the sampler read. Integers, then numbers, so that a row moves at once.
        self._state = torch.zeros(4, num_rows, dtype=torch.int64, device=device)
        self._tokens, self._positions, self._cursors, self._top_ks = self._state
        self._numbers = torch.ones(2, num_rows, dtype=torch.float64, device=device)
        self._temperatures, self._top_ps = self._numbers
        self._uniforms = torch.zeros(num_slots * width, UNIFORMS_PER_TOKEN, dtype=torch.float64, device=device)
        # On the host, what decides who is finished.
        self._host = np.zeros((4, num_rows), dtype=np.int64)
        self._lengths, self._left, self._lanes, self._host_cursors = self._host
        self._stops = np.full((num_rows, 0), _NO_TOKEN)
        self._free_lanes = list(range(num_slots))
        self._drawn = np.zeros(num_slots * width, dtype=np.int64)
        self._logprobs = np.zeros(num_slots * width, dtype=np.float32)

    @property
    def max_length(self) -> int:
        """Tokens of the longest active row, the one to be decoded next included."""
        return int(self._lengths[: self.num_active].max())

    @property
    def needs(self) -> Needs:
        """What the active rows ask of the sampler."""
        if self._needs is None:
            self._needs = Needs.of([job.request.params for job in self._jobs])
        return self._needs

    def job(self, row: int) -> Job:
        """Whose row it is."""
        return self._jobs[row]

    def admit(self, job: Job) -> None:
        """Append a row for the job; its next token is drawn from the logits of its sequence."""
        lane, row, params = self._free_lanes.pop(), self.num_active, job.request.params
        num_drawn = len(job.token_ids)
        length, start = len(job.request.token_ids) + num_drawn, lane * self._width
        self._state[:, row] = torch.tensor([0, length - 1, start + num_drawn, params.top_k]).to(self._device)
        self._numbers[:, row] = torch.tensor([params.temperature, params.top_p], dtype=torch.float64).to(self._device)
        self._host[:, row] = length, params.max_new_tokens - num_drawn, lane, start + num_drawn
        self._drawn[start : start + num_drawn] = job.token_ids
        self._logprobs[start : start + num_drawn] = job.logprobs
        self._set_stops(row, params.stop_token_ids)
        numbers = torch.from_numpy(uniforms(job.request.seed, params.max_new_tokens))
        self._uniforms[start : start + len(numbers)] = numbers.to(self._device)
        self._jobs.append(job)
        self._needs = None
        self.num_active += 1

    def draw(self) -> Draw:
        """How every active row draws its next token."""
        num_active = self.num_active
        return Draw(
            temperatures=self._temperatures[:num_active].float(),
            top_ps=self._top_ps[:num_active],
            top_ks=self._top_ks[:num_active],
            uniforms=self._uniforms[self._cursors[:num_active]],
        )

    def next_inputs(self, min_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The drawn tokens and their positions. Rows beyond the active ones, up to ``min_rows``, hold leftovers."""
        num_rows = max(self.num_active, min_rows)
        return self._tokens[:num_rows], self._positions[:num_rows]

    def record(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> tuple[list[int], set[int]]:
        """Keep one drawn token per active row.

        Gives the rows that are finished by it, the last first, and those among them whose log-prob is not finite.
        """
        num_active = self.num_active
        self._tokens[:num_active] = tokens
        self._state[1:3, :num_active] += 1
        drawn, numbers = tokens.cpu().numpy(), logprobs.cpu().numpy()
        cursors = self._host_cursors[:num_active]
        self._drawn[cursors] = drawn
        self._logprobs[cursors] = numbers
        self._lengths[:num_active] += 1
        self._left[:num_active] -= 1
        cursors += 1
        broken = ~np.isfinite(numbers)
        done = (self._left[:num_active] == 0) | broken
        if self._stops.shape[1]:
            done |= (drawn[:, None] == self._stops[:num_active]).any(axis=1)
        return [int(row) for row in np.flatnonzero(done)[::-1]], {int(row) for row in np.flatnonzero(broken)}

    def note_version(self, version: int) -> None:
        """All that was drawn until now is of this version or older ones."""
        for row, job in enumerate(self._jobs):
            job.changes.append((version, self._num_drawn(row)))

    def remove(self, row: int) -> tuple[Job, int, int]:
        """Take a row out, and give its job what was drawn; the last active row takes its place.

        Gives the job, which row has to move here, and that row's length. Rows must be removed from the last to the
        first.
        """
        job, lane = self._jobs[row], int(self._lanes[row])
        start = lane * self._width
        stop = start + self._num_drawn(row)
        job.token_ids = self._drawn[start:stop].copy()
        job.logprobs = self._logprobs[start:stop].copy()
        self._free_lanes.append(lane)
        self.num_active -= 1
        last = self.num_active
        length = int(self._lengths[last])
        if last != row:
            self._jobs[row] = self._jobs[last]
            self._state[:, row] = self._state[:, last]
            self._numbers[:, row] = self._numbers[:, last]
            self._host[:, row] = self._host[:, last]
            self._stops[row] = self._stops[last]
        self._jobs.pop()
        self._needs = None
        return job, last, length

    def _num_drawn(self, row: int) -> int:
        return self._jobs[row].request.params.max_new_tokens - int(self._left[row])

    def _set_stops(self, row: int, token_ids: tuple[int, ...]) -> None:
        surplus = len(token_ids) - self._stops.shape[1]
        if surplus > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, surplus)), constant_values=_NO_TOKEN)
        self._stops[row] = _NO_TOKEN
        self._stops[row, : len(token_ids)] = token_ids
