"""Looks after the servers: probes them, and starts dead ones again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from megarl.core.engine_fault import EngineFault
from megarl.core.protocols import EnginePart, ServerProcesses
from megarl.generation.fleet.roster import Roster
from megarl.generation.fleet.server import Server
from megarl.generation.fleet.settings import PROBES_TO_MOVE, FleetSettings

_ALL_PARTS: tuple[EnginePart, ...] = ("weights", "kv_cache")


class Watch:
    """One task for each server. Of the event loop's thread."""

    def __init__(
        self,
        roster: Roster,
        settings: FleetSettings,
        processes: ServerProcesses | None,
        on_silence: Callable[[Server], None],
    ) -> None:
        self._roster = roster
        self._settings = settings
        self._processes = processes
        # called when a server has not answered for a while
        self._on_silence = on_silence
        self._tasks: list[asyncio.Task[None]] = []
        # cleared while the trainer has the memory: a server that starts would take it
        self.has_memory = asyncio.Event()
        self.has_memory.set()

    def start(self) -> None:
        """Watch from now on."""
        self._tasks = [asyncio.create_task(self._watch(server)) for server in self._roster.servers]

    async def close(self) -> None:
        """Watch no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, server: Server) -> None:
        try:
            while server.state != "retired":
                server.alarm.clear()
                if self._roster.restarts(server) and self._processes is not None:
                    await self._restart(server, self._processes)
                elif not await self._is_alarmed(server, self._seconds_to_probe(server)):
                    await self._probe_until_alarm(server)
            if self._processes is not None:
                await self._processes.end(server.url)
        except Exception as error:
            # a mistake of ours: whoever waits for samples must hear of it
            self._roster.error = error
            self._roster.changed.beat()

    async def _is_alarmed(self, server: Server, seconds: float) -> bool:
        """Wait for the next probe; True if the server changes before, which decides anew what to do, and when."""
        if seconds > 0:
            # not `asyncio.wait_for`: in Python 3.11 it loses a cancellation that meets the alarm
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await server.alarm.wait()
        return server.alarm.is_set()

    def _seconds_to_probe(self, server: Server) -> float:
        if server.state == "suspect" and not server.released:
            return self._settings.backoff_seconds(max(server.failures_in_a_row - 1, server.failed_probes))
        if server.is_up and server.failed_probes:
            return self._settings.backoff_seconds(server.failed_probes)
        return self._settings.probe_seconds

    async def _probe_until_alarm(self, server: Server) -> None:
        """A server that dies in the middle of a probe is not kept waiting for the probe to end."""
        probe = asyncio.create_task(self._probe(server))
        alarm = asyncio.create_task(server.alarm.wait())
        try:
            await asyncio.wait((probe, alarm), return_when=asyncio.FIRST_COMPLETED)
            if probe.done():
                probe.result()
        finally:
            probe.cancel()
            alarm.cancel()

    async def _probe(self, server: Server) -> None:
        if server.is_up and self._roster.is_gone(server):
            self._roster.died(server, "its process ended")
            return
        # Without memory it cannot generate, which is how SGLang finds out whether it is well.
        if server.released:
            return
        revision, num_served = server.revision, server.num_served
        is_well = await server.engine.is_healthy(self._settings.probe_seconds)
        version: int | None = None
        if is_well and server.state == "suspect":
            try:
                async with asyncio.timeout(self._settings.probe_seconds):
                    version = await server.engine.version()
            except (EngineFault, TimeoutError):
                is_well = False
        if server.revision != revision or server.released:
            return
        if is_well:
            self._roster.probe_passed(server, version)
        # A server that answers requests is too busy for probes, not ill.
        elif server.num_served == num_served:
            self._roster.probe_failed(server)
            if server.is_up and server.failed_probes >= PROBES_TO_MOVE:
                self._on_silence(server)

    async def _restart(self, server: Server, processes: ServerProcesses) -> None:
        # One that hangs may hold memory that the trainer needs: it ends at once, and starts when there is room.
        await processes.end(server.url)
        await self.has_memory.wait()
        self._roster.restarting(server)
        try:
            await processes.restart(server.url)
            if not self.has_memory.is_set():  # the trainer took its turn while this one started
                await server.engine.release(_ALL_PARTS)
                server.released.update(_ALL_PARTS)
        except EngineFault as fault:
            server.last_fault = str(fault)
            self._roster.died(server, "failed start", f"it did not start ({fault})")
        else:
            self._roster.came_back(server)
