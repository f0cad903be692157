"""Generation servers behind one call: they may hang, lie or die, and the samples still come."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import (
    EnginePart,
    GenerationRequest,
    OnServed,
    RemoteEngine,
    ServerProcesses,
    Statistics,
)
from megarl.generation.fleet.core import FleetCore, Served
from megarl.generation.fleet.settings import FleetSettings
from megarl.generation.fleet.work import Work

COUNTED = (
    "engine/num_restarts",
    "engine/num_retries",
    "engine/num_rejected",
    "engine/num_lost",
    "engine/num_aborted",
)


class ServerFleet:
    """All servers of a run; implements `PushTargets`. Of the driver. The work happens in ``loop``'s thread, where
    ``say`` is called too; the methods are for other threads, and return when what they ask for is done.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        settings: FleetSettings,
        loop: LoopThread,
        processes: ServerProcesses | None,
        say: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._core = FleetCore(engines, settings, processes, say)
        loop.run(self._core.open())

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        on_served: OnServed | None = None,
    ) -> Batch:
        """Start at once, in the background.

        ``groups[i]`` is the group of request i: a group's requests go to one server while it has room. Only samples
        whose every token was drawn by weights in ``versions`` are taken. ``on_served`` is called in the loop.
        """
        work = self._loop.run(self._core.submit(requests, groups, versions, on_served))
        return Batch(work, self._core, self._loop)

    def targets(self) -> list[str]:
        """See `PushTargets.targets`; those that do not answer their probes are left out."""
        return self._loop.run(self._core.targets())

    def pushed(self, url: str, version: int, problem: str | None) -> None:
        """See `PushTargets.pushed`."""
        self._loop.run(self._core.pushed(url, version, problem))

    def needs_push(self) -> bool:
        """Whether some server is up without the latest weights."""
        return self._loop.run(self._core.needs_push())

    def release(self, parts: Sequence[EnginePart]) -> None:
        """All servers give this memory back. Without weights they serve nothing until the next push."""
        self._loop.run(self._core.release(parts))

    def resume(self, parts: Sequence[EnginePart]) -> None:
        """All servers that gave this memory back take it again."""
        self._loop.run(self._core.resume(parts))

    def report(self, meter: Statistics) -> None:
        """What happened since the last report."""
        num_healthy, counts = self._loop.run(self._core.take_counts())
        meter.last("engine/num_healthy", num_healthy)
        for name in COUNTED:
            meter.sum(name, counts[name])

    def describe(self) -> str:
        """One line for each server: its state, what it did, what went wrong."""
        return self._loop.run(self._core.describe())

    def close(self) -> None:
        """Stop all work; the servers stay as they are."""
        self._loop.run(self._core.close())


class Batch:
    """Requests on their way."""

    def __init__(self, work: Work, core: FleetCore, loop: LoopThread) -> None:
        self._work = work
        self._core = core
        self._loop = loop

    def wait(self, num_groups: int | None = None) -> Served:
        """Until all are served; with ``num_groups`` until so many groups are complete, then the rest is aborted and
        what it got to is collected (finish "abort"). The batch is over then, whatever came of it.
        """
        return self._loop.run(self._core.wait(self._work, num_groups))
