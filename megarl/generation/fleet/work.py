"""Requests that wait, and what became of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.protocols import Generation, GenerationRequest, OnServed


@dataclass(eq=False, slots=True)
class Job:
    """One request of a batch, until it is served."""

    request: GenerationRequest
    # in its batch
    place: int
    group: int
    # what went wrong so far, by server
    faults: list[tuple[str, EngineFault]] = field(default_factory=list)
    num_starts: int = 0
    generation: Generation | None = None

    def avoids(self, url: str, others: Collection[str]) -> bool:
        """Whether a server failed it already while another may still do better."""
        failed_at = {failed_url for failed_url, _ in self.faults}
        return url in failed_at and not failed_at.issuperset(others)


class Queue:
    """The jobs of a batch that wait. A group stays with the server that began it, as long as that has room: the prompt
    is prefilled once. Jobs that come back go first.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        groups: dict[int, deque[Job]] = {}
        for job in jobs:
            groups.setdefault(job.group, deque()).append(job)
        # what is left of each group, by the server that began it
        self._unbegun = deque(groups.values())
        self._begun: dict[str, deque[deque[Job]]] = {}
        self._returned: deque[Job] = deque()
        self._num_jobs = len(jobs)

    def __len__(self) -> int:
        return self._num_jobs

    def put_back(self, job: Job) -> None:
        """The job must be done again, possibly elsewhere."""
        self._returned.append(job)
        self._num_jobs += 1

    def take(self, url: str, with_room: Collection[str], serving: Collection[str]) -> Job | None:
        """The next job for this server, if there is one. ``with_room``: servers that could take a job now, ``serving``:
        all that serve this batch, among them those.
        """
        job = self._take_returned(url, serving) or self._take_own(url) or self._take_of_busy(with_room)
        if job is not None:
            self._num_jobs -= 1
        return job

    def clear(self) -> None:
        """Forget all."""
        self._unbegun.clear()
        self._begun.clear()
        self._returned.clear()
        self._num_jobs = 0

    def _take_returned(self, url: str, serving: Collection[str]) -> Job | None:
        for place, job in enumerate(self._returned):
            if not job.avoids(url, serving):
                del self._returned[place]
                return job
        return None

    def _take_own(self, url: str) -> Job | None:
        own = self._begun.setdefault(url, deque())
        if not own:
            if not self._unbegun:
                return None
            own.append(self._unbegun.popleft())
        return self._take_first(own)

    def _take_of_busy(self, with_room: Collection[str]) -> Job | None:
        for url, groups in self._begun.items():
            if groups and url not in with_room:
                return self._take_first(groups)
        return None

    @staticmethod
    def _take_first(groups: deque[deque[Job]]) -> Job:
        job = groups[0].popleft()
        if not groups[0]:
            groups.popleft()
        return job


class Work:
    """A batch on its way."""

    def __init__(
        self,
        number: int,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        on_served: OnServed | None = None,
    ) -> None:
        self.number = number
        self.jobs = [
            Job(request, place, group) for place, (request, group) in enumerate(zip(requests, groups, strict=True))
        ]
        self.queue = Queue(self.jobs)
        self.versions = versions
        self._on_served = on_served
        self.num_running = 0
        # the rest is not wanted any more: what ends now ends for good
        self.is_cut = False
        self.error: EngineError | Exception | None = None
        self._num_left = Counter(groups)
        self.num_groups = len(self._num_left)
        self.num_complete = 0

    def finish(self, job: Job, generation: Generation) -> None:
        """The job is served."""
        job.generation = generation
        if not self.is_cut:
            self._num_left[job.group] -= 1
            self.num_complete += self._num_left[job.group] == 0
            if self._on_served is not None:
                self._on_served(job.place, generation)

    @property
    def num_unserved(self) -> int:
        """Jobs without a generation."""
        return sum(job.generation is None for job in self.jobs)
