"""Servers on several machines: the driver asks the rank that started a server to end it, or to start it again.

They leave each other notes in the store at which the ranks met: that rank's main thread is busy with collectives.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Mapping
from typing import Protocol

from megarl.core.engine_fault import EngineFault
from megarl.generation.servers.processes import StartedServers

_POLL_SECONDS = 0.2
# on top of what the server itself may take to start
_SECONDS_TO_ANSWER = 30.0


class Notes(Protocol):
    """torch's store, as far as it is used here."""

    def set(self, key: str, value: str, /) -> None:
        """Leave a note."""

    def get(self, key: str, /) -> bytes:
        """One that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these are there."""


class ServersEverywhere:
    """All servers that the ranks of a run started; implements `ServerProcesses`. Of the driver."""

    def __init__(
        self, own: StartedServers | None, rank_of: Mapping[str, int], notes: Notes, start_timeout_seconds: float
    ) -> None:
        self._own = own
        self._rank_of = rank_of
        self._notes = notes
        self._seconds = start_timeout_seconds + _SECONDS_TO_ANSWER
        self._numbers = {rank: itertools.count() for rank in rank_of.values()}

    def is_running(self, url: str) -> bool:
        """Of those on other machines nothing is known: they are gone when they do not answer."""
        return self._own.is_running(url) if self._own is not None and url in self._own.urls else True

    async def end(self, url: str) -> None:
        """See `ServerProcesses`. A machine that does not do it has other troubles, which the watchdog sees."""
        if self._own is not None and url in self._own.urls:
            await self._own.end(url)
        else:
            await self._ask("end", url)

    async def restart(self, url: str) -> None:
        """See `ServerProcesses`."""
        if self._own is not None and url in self._own.urls:
            await self._own.restart(url)
        elif problem := await self._ask("restart", url):
            raise EngineFault("unreachable", problem)

    async def _ask(self, what: str, url: str) -> str:
        """What went wrong, if anything did."""
        rank = self._rank_of[url]
        number = next(self._numbers[rank])
        await asyncio.to_thread(self._notes.set, _asked(rank, number), json.dumps([what, url]))
        deadline = time.monotonic() + self._seconds
        while not await asyncio.to_thread(self._notes.check, [_answered(rank, number)]):
            if time.monotonic() > deadline:
                return f"rank {rank} did not {what} it within {self._seconds:.0f} s"
            await asyncio.sleep(_POLL_SECONDS)
        return str(json.loads(await asyncio.to_thread(self._notes.get, _answered(rank, number))))


class Errands:
    """Does what the driver asks for, one after the other, in a thread. Of another rank that started servers."""

    def __init__(self, started: StartedServers, rank: int, notes: Notes) -> None:
        self._started = started
        self._rank = rank
        self._notes = notes
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-errands", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is done any more when this returns; a start that is under way is waited for."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        for number in itertools.count():
            try:
                while not self._notes.check([_asked(self._rank, number)]):
                    if self._is_over.wait(_POLL_SECONDS):
                        return
                what, url = json.loads(self._notes.get(_asked(self._rank, number)))
                self._notes.set(_answered(self._rank, number), json.dumps(self._do(what, url)))
            except RuntimeError:  # the store is gone with the driver: the watchdog ends this rank
                return

    def _do(self, what: str, url: str) -> str:
        try:
            asyncio.run(self._started.restart(url) if what == "restart" else self._started.end(url))
        except (EngineFault, OSError) as fault:
            return str(fault)
        return ""


def _asked(rank: int, number: int) -> str:
    return f"servers/{rank}/asked/{number}"


def _answered(rank: int, number: int) -> str:
    return f"servers/{rank}/answered/{number}"
