"""The fleet as coroutines of one event loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.protocols import (
    EnginePart,
    Generation,
    GenerationRequest,
    OnServed,
    RemoteEngine,
    ServerProcesses,
)
from megarl.generation.fleet.dispatch import Dispatch
from megarl.generation.fleet.roster import Roster
from megarl.generation.fleet.server import Server
from megarl.generation.fleet.settings import CONTROL_SECONDS, FleetSettings
from megarl.generation.fleet.watch import Watch
from megarl.generation.fleet.work import Work


@dataclass(frozen=True, slots=True)
class Served:
    """What became of a batch."""

    # in the order of the requests; None: not served
    generations: list[Generation | None]
    # nobody serves these versions, but somebody could after a push: push, then submit the rest again
    needs_push: bool


class FleetCore:
    """All servers, and the batches that they work on. Only the event loop's thread may call it."""

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        settings: FleetSettings,
        processes: ServerProcesses | None,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self.roster = Roster(engines, settings, processes, say)
        self._dispatch = Dispatch(self.roster, settings)
        self._watch = Watch(self.roster, settings, processes, self._redo_elsewhere)

    async def open(self) -> None:
        """Begin to watch the servers."""
        self._watch.start()

    async def close(self) -> None:
        """Stop all work."""
        await self._watch.close()
        await self._dispatch.close()

    async def submit(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        on_served: OnServed | None = None,
    ) -> Work:
        """See `ServerFleet.submit`."""
        return self._dispatch.submit(requests, groups, versions, on_served)

    async def wait(self, work: Work, num_groups: int | None = None) -> Served:
        """See `Batch.wait`."""
        num_wanted = work.num_groups if num_groups is None else min(num_groups, work.num_groups)
        deadline = asyncio.get_running_loop().time() + self._settings.step_timeout_seconds
        needs_push = False
        try:
            while work.num_complete < num_wanted:
                if work.error is not None:
                    raise work.error
                self.roster.require_floor()
                if self._can_only_go_on_after_push(work):
                    needs_push = True
                    break
                await self._wait_for_change(deadline, f"{work.num_unserved} of {len(work.jobs)} requests wait")
            else:
                if work.num_complete < work.num_groups:
                    await self._dispatch.cut(work)
        finally:
            self._dispatch.drop(work)
        return Served([job.generation for job in work.jobs], needs_push)

    async def targets(self) -> list[str]:
        """See `ServerFleet.targets`."""
        return self.roster.targets()

    async def pushed(self, url: str, version: int, problem: str | None) -> None:
        """See `PushTargets.pushed`."""
        self.roster.pushed(url, version, problem)
        self._dispatch.start_soon()

    async def release(self, parts: Sequence[EnginePart]) -> None:
        """See `ServerFleet.release`."""
        if "weights" in parts:
            self._watch.has_memory.clear()

        async def release(server: Server) -> None:
            # What it is about to lose does not serve, even if the answer is lost.
            server.released.update(parts)
            if "weights" in parts:
                self.roster.lost_weights(server)
            await server.engine.release(parts)

        await self._tell_all("release its memory", release, is_fatal=True)

    async def resume(self, parts: Sequence[EnginePart]) -> None:
        """See `ServerFleet.resume`."""

        async def resume(server: Server) -> None:
            # A server that was started again in the meantime has never given it back.
            wanted = [part for part in parts if part in server.released]
            if wanted:
                await server.engine.resume(wanted)
                server.released.difference_update(wanted)

        if "weights" in parts:
            self._watch.has_memory.set()
        await self._tell_all("resume its memory", resume, is_fatal=True)
        self._dispatch.start_soon()

    async def needs_push(self) -> bool:
        """See `ServerFleet.needs_push`."""
        return self.roster.needs_push

    async def describe(self) -> str:
        """See `ServerFleet.describe`."""
        return self.roster.describe()

    async def take_counts(self) -> tuple[int, Counter[str]]:
        """Servers that serve, and what happened since the last call."""
        counts = self.roster.tally.copy()
        self.roster.tally.clear()
        return self.roster.num_healthy, counts

    def _can_only_go_on_after_push(self, work: Work) -> bool:
        if work.num_running or any(s.may_serve(work.versions) for s in self.roster.servers):
            return False
        return any(server.is_pushable for server in self.roster.servers)

    def _redo_elsewhere(self, server: Server) -> None:
        """The server hangs: let others do what it works on, if there are others."""
        if self._dispatch.has_others(server):
            self._dispatch.move_away(server)

    async def _wait_for_change(self, deadline: float, what: str) -> None:
        seconds = deadline - asyncio.get_running_loop().time()
        if seconds <= 0 or not await self.roster.changed.wait(seconds):
            raise EngineError(
                "MRL-5162",
                f"{what} after {self._settings.step_timeout_seconds:g} s (generation.step_timeout_seconds).\n"
                f"The servers:\n{self.roster.describe()}\n"
                "Set a longer time, use more servers, or shorten rollout.max_new_tokens.",
            )

    async def _tell_all(self, what: str, tell: Callable[[Server], Awaitable[None]], *, is_fatal: bool) -> None:
        """Tell all servers that are up; one that does not do it is not counted on any more."""

        async def tell_one(server: Server) -> None:
            try:
                async with asyncio.timeout(CONTROL_SECONDS):
                    await tell(server)
            except (EngineFault, TimeoutError) as error:
                fault = str(error) or f"timeout: no answer in {CONTROL_SECONDS:g} s"
                self.roster.misbehaved(server, what, fault, is_fatal=is_fatal)

        await asyncio.gather(*(tell_one(server) for server in self.roster.servers if server.is_up))
