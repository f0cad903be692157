"""The worker processes of one reward function.

Each *seat* has one worker at a time and asks it for one sample after the other (an async function: for many at once).
One more worker is kept warm, to take the place of one that is lost. A worker that has scored other samples may have
been spoilt by them, so a failure counts only if the sample was alone in a worker without a past: whatever fails
elsewhere is tried again there. What takes too long by itself is not tried again; whoever lost his relay always is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from concurrent.futures import Future
from dataclasses import dataclass, field

from megarl.core.errors import ConfigError, DataError, EngineError
from megarl.core.loop_thread import LoopThread
from megarl.rewards.outcome import RELAY_IS_LOST, TOOK_TOO_LONG, Failure
from megarl.rewards.relay_turns import turns
from megarl.rewards.reward import Reward
from megarl.rewards.worker_process import WorkerLost, WorkerProcess, WorkerSpec

logger = logging.getLogger(__name__)

_MAX_WORKERS = 16
_MAX_FAILED_STARTS = 3


def default_num_workers() -> int:
    """One for each core that this process may use."""
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)))


@dataclass(order=True, slots=True)
class _Job:
    # what is tried again comes first; else in the order of arrival
    is_first_try: bool
    number: int
    parcel: bytes = field(compare=False)
    future: Future[Reward | Failure] = field(compare=False)


@dataclass(slots=True)
class _Shift:
    """The time that a worker is asked: as many lanes as it scores samples at once."""

    worker: WorkerProcess
    # those that wait for a job, and can be sent home
    idle: set[asyncio.Task[_Job | None]] = field(default_factory=set)
    is_over: bool = False


class WorkerPool:
    """Scores samples in the background. Its processes begin at once and end with `close`, or with this process."""

    def __init__(self, spec: WorkerSpec, num_workers: int) -> None:
        self._spec = spec
        self._jobs: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._numbers = itertools.count()
        self._workers: set[WorkerProcess] = set()
        self._spare: WorkerProcess | None = None
        self._seats: list[asyncio.Task[None]] = []
        # why no worker can be started
        self._broken: Exception | None = None
        self._num_failed_starts = 0
        self._is_announced = False
        self._loop = LoopThread(f"reward {spec.name}")
        self._loop.run(self._open(num_workers))

    def submit(self, parcel: bytes) -> Future[Reward | Failure]:
        """Score a wrapped sample. The future raises a `MegarlError` if no worker can be started."""
        job = _Job(True, next(self._numbers), parcel, Future())
        self._loop.call(self._add, job)
        return job.future

    @property
    def pids(self) -> list[int]:
        """Of all processes that the driver started for the pool."""
        return [worker.pid for worker in tuple(self._workers)]

    def close(self) -> None:
        """End all processes. What is not scored yet never will be."""
        self._loop.run(self._end())
        self._loop.close()

    async def _open(self, num_workers: int) -> None:
        self._seats = [asyncio.create_task(self._seat()) for _ in range(num_workers)]

    async def _end(self) -> None:
        for seat in self._seats:
            seat.cancel()
        await asyncio.gather(*self._seats, return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._workers))
        self._workers.clear()

    def _add(self, job: _Job) -> None:
        if self._broken is not None:
            job.future.set_exception(self._broken)
        else:
            self._jobs.put_nowait(job)

    async def _seat(self) -> None:
        try:
            await self._seat_workers()
        except OSError as error:
            text = f'reward "{self._spec.name}" could not start: the system starts no worker ({error.strerror}).'
            self._break(DataError("MRL-2111", text))
        except Exception as error:  # a mistake of ours must not leave anybody waiting
            self._break(error)

    async def _seat_workers(self) -> None:
        """One worker after the other, until none can be started."""
        waiting: _Job | None = None
        try:
            while self._broken is None:
                worker = self._take_worker()
                try:
                    if not await self._is_ready(worker):
                        continue
                    if waiting is not None:
                        await self._attempt(worker, waiting, is_alone=True)
                        waiting = None
                    waiting = await self._use(worker)
                finally:
                    self._workers.discard(worker)
                    await worker.end()
        finally:
            if waiting is not None:
                self._add(waiting)

    def _take_worker(self) -> WorkerProcess:
        """The warm worker, and have another one warmed in its place."""
        worker = self._spare or self._start()
        self._spare = self._start()
        return worker

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self._spec)
        self._workers.add(worker)
        return worker

    async def _is_ready(self, worker: WorkerProcess) -> bool:
        try:
            await worker.ready()
        except WorkerLost as lost:
            failure, relays = lost.failure, self._spec.relays
            # a machine that is gone is the launcher's to replace, and worth another start
            is_gone = failure.code == RELAY_IS_LOST.code
            if is_gone and relays is not None and turns.has_one(relays.places):
                return False
            self._num_failed_starts += 1
            if failure.code.startswith("MRL-1"):  # a mistake in the configuration does not go away
                self._break(ConfigError(failure.code, failure.text))
            elif self._num_failed_starts >= _MAX_FAILED_STARTS:
                text = f'reward "{self._spec.name}" {failure.kind}: {failure.text}.'
                self._break((EngineError if is_gone else DataError)(failure.code, text))
            return False
        self._num_failed_starts = 0
        if not self._is_announced:
            self._is_announced = True
            logger.info('reward "%s" runs in worker processes, isolation: %s', self._spec.name, worker.isolation)
        return True

    def _break(self, error: Exception) -> None:
        """No worker can be started: whoever waits is told why."""
        self._broken = error
        while not self._jobs.empty():
            self._jobs.get_nowait().future.set_exception(error)

    async def _use(self, worker: WorkerProcess) -> _Job | None:
        """Ask the worker until it is lost, or has to make room for one without a past; gives the job for that one."""
        shift = _Shift(worker)
        lanes = [asyncio.create_task(self._lane(shift)) for _ in range(worker.concurrency)]
        lost = asyncio.create_task(worker.until_lost())
        try:
            await asyncio.wait([*lanes, lost], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            shift.idle.update(lanes)  # what is under way will not be waited for
            raise
        finally:
            lost.cancel()
            shift.is_over = True
            for lane in shift.idle:
                lane.cancel()
            ended = await asyncio.gather(*lanes, return_exceptions=True)
        waiting = [job for job in ended if isinstance(job, _Job)]
        for job in waiting[1:]:
            self._add(job)
        return waiting[0] if waiting else None

    async def _lane(self, shift: _Shift) -> _Job | None:
        """One sample after the other; gives the job that needs another worker."""
        worker, own = shift.worker, asyncio.current_task()
        assert own is not None, "a lane is a task"
        while not worker.is_lost and not shift.is_over:
            shift.idle.add(own)
            job = await self._jobs.get()
            shift.idle.discard(own)
            is_alone = worker.is_fresh and worker.concurrency == 1
            if worker.is_lost or not (job.is_first_try or is_alone):
                return job
            await self._attempt(worker, job, is_alone=is_alone)
        return None

    async def _attempt(self, worker: WorkerProcess, job: _Job, *, is_alone: bool) -> None:
        try:
            outcome = await worker.call(job.parcel)
        except WorkerLost as lost:
            outcome = lost.failure
        if outcome is RELAY_IS_LOST:
            self._add(job)
            return
        too_slow = isinstance(outcome, Failure) and outcome.kind == TOOK_TOO_LONG and worker.concurrency == 1
        if isinstance(outcome, Reward) or is_alone or too_slow:
            job.future.set_result(outcome)
        else:
            job.is_first_try = False
            self._add(job)
