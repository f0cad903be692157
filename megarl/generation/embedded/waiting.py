"""The line in front of the slots.

Requests with one sequence stand together, so that it is prefilled once. Of those that arrived in the same moment, what
may take longest starts first, so that the end of a call is not one long row decoding alone; what arrived at an earlier
moment goes before what arrived later, so that nobody waits for ever.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megarl.generation.embedded.job import Job


@dataclass(slots=True, eq=False)
class Queued:
    """The jobs that continue one sequence, and the place of the group in the line: the smallest rank is first."""

    sequence: NDArray[np.int64]
    arrival: int
    moment: int
    jobs: deque[Job] = field(default_factory=deque)
    max_new_tokens: int = 0

    def rank(self) -> tuple[int, int, int, int]:
        return self.moment, -self.max_new_tokens, -len(self.sequence), self.arrival


class WaitingLine:
    """Jobs without a row, in the order in which they get one."""

    def __init__(self) -> None:
        self._groups: dict[bytes, Queued] = {}
        self._order: list[Queued] = []
        self._is_ordered = True
        self._arrivals = itertools.count()
        self._moment = 0
        self._front = 0

    def __len__(self) -> int:
        return sum(len(group.jobs) for group in self._groups.values())

    def __bool__(self) -> bool:
        return bool(self._groups)

    def add(self, jobs: Iterable[Job]) -> None:
        """To the end of the line, or to the jobs that wait with the same sequence."""
        self._insert(jobs, self._moment)

    def put_first(self, jobs: Iterable[Job]) -> None:
        """Before all others."""
        self._front -= 1
        self._insert(jobs, self._front)

    def take(self, count: int) -> list[tuple[Job, Queued]]:
        """At most ``count`` jobs from the front, and the group of each. A group that is left in part is then first."""
        self._moment += 1
        if not self._is_ordered:
            self._order = sorted(self._groups.values(), key=Queued.rank, reverse=True)  # the first is the last
            self._is_ordered = True
        taken: list[tuple[Job, Queued]] = []
        while self._order and len(taken) < count:
            group = self._order[-1]
            while group.jobs and len(taken) < count:
                taken.append((group.jobs.popleft(), group))
            if group.jobs:
                self._front -= 1
                group.moment = self._front
            else:
                self._order.pop()
                del self._groups[group.sequence.tobytes()]
        return taken

    def remove(self, is_wanted: Callable[[Job], bool]) -> list[Job]:
        """Take these jobs out of the line."""
        removed: list[Job] = []
        for key, group in list(self._groups.items()):
            removed += [job for job in group.jobs if is_wanted(job)]
            group.jobs = deque(job for job in group.jobs if not is_wanted(job))
            if not group.jobs:
                del self._groups[key]
                self._is_ordered = False
        return removed

    def jobs(self) -> Sequence[Job]:
        """All jobs, in no particular order."""
        return [job for group in self._groups.values() for job in group.jobs]

    def _insert(self, jobs: Iterable[Job], moment: int) -> None:
        for job in jobs:
            sequence = job.sequence()
            key = sequence.tobytes()
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = Queued(sequence, next(self._arrivals), moment)
            group.jobs.append(job)
            group.moment = min(group.moment, moment)
            group.max_new_tokens = max(group.max_new_tokens, job.request.params.max_new_tokens)
            self._is_ordered = False
