"""Servers of a fleet that exist in this process only, and a clock that jumps: hours of patience pass at once."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.core.engine_fault import EngineFault
from megarl.core.protocols import EngineKind, EnginePart, Generation, GenerationRequest, PauseMode, SamplingParams
from megarl.generation.fleet.core import FleetCore
from megarl.generation.fleet.settings import FleetSettings

PARAMS = SamplingParams(max_new_tokens=3)


class JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting, moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen again"
        self.now += max(timeout, 0.0)
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = JumpingSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def live(story: Coroutine[Any, Any, Any]) -> Any:
    """Run it in jumping time."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(story)


# what a server does with a request: an answer is made of the weights; a fault is raised
Script = Callable[["ScriptedServer", GenerationRequest], None]


def fault(kind: Any) -> Script:
    def fail(server: ScriptedServer, request: GenerationRequest) -> None:
        raise EngineFault(kind, "as the test wants it")

    return fail


def honest(server: ScriptedServer, request: GenerationRequest) -> None:
    """Answer well."""


@dataclass(eq=False)
class ScriptedServer:
    """Speaks the protocol of a server; misbehaves as ``script`` says, request by request, and is honest afterwards."""

    url: str
    script: list[Script] = field(default_factory=list)
    seconds: float = 1.0
    weights: int = 0
    # accepts everything and answers nothing, as a stopped process does
    hangs: bool = False
    is_running: bool = True
    # says this version instead of that of its weights
    claims: int | None = None
    aborted: set[str] = field(default_factory=set)
    num_starts: int = 0
    num_running: int = 0
    most_running: int = 0
    served: list[GenerationRequest] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    async def _reach(self) -> None:
        if not self.is_running:
            raise EngineFault("unreachable", "connection refused")
        if self.hangs:
            await asyncio.sleep(1e6)

    async def generate(self, request: GenerationRequest, timeout: float) -> Generation:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        weights = self.weights
        try:
            async with asyncio.timeout(timeout):
                await self._reach()
                (self.script.pop(0) if self.script else honest)(self, request)
                num_starts, end = self.num_starts, asyncio.get_running_loop().time() + self.seconds
                while asyncio.get_running_loop().time() < end and request.id not in self.aborted:
                    await asyncio.sleep(min(0.1, self.seconds))
                    await self._reach()
                    if self.num_starts != num_starts:
                        raise EngineFault("unreachable", "the connection broke off")
        except TimeoutError:
            raise EngineFault("timeout", "no answer in time") from None
        finally:
            self.num_running -= 1
        self.served.append(request)
        return answer(request, weights if self.claims is None else self.claims, is_aborted=request.id in self.aborted)

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        await self._reach()
        self.aborted.update(ids or ())

    async def pause(self, mode: PauseMode) -> None:
        await self._tell(f"pause {mode}")

    async def continue_generation(self) -> None:
        await self._tell("continue")

    async def kind(self) -> EngineKind:
        return EngineKind("embedded", (0, 1))

    async def control(self, route: str, body: Mapping[str, Any], timeout: float) -> Any:
        raise NotImplementedError

    async def is_healthy(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._reach()
        except (EngineFault, TimeoutError):
            return False
        return True

    async def version(self) -> int:
        await self._reach()
        return self.weights if self.claims is None else self.claims

    async def release(self, parts: Sequence[EnginePart]) -> None:
        await self._tell(f"release {' '.join(parts)}")

    async def resume(self, parts: Sequence[EnginePart]) -> None:
        await self._tell(f"resume {' '.join(parts)}")

    async def _tell(self, what: str) -> None:
        await self._reach()
        self.told.append(what)


class ScriptedProcesses:
    """Starts the servers of a test again; a server in ``broken`` does not come up."""

    def __init__(self, servers: Sequence[ScriptedServer]) -> None:
        self._servers = {server.url: server for server in servers}
        self.broken: set[str] = set()
        self.on_start: Callable[[ScriptedServer], None] = lambda _: None

    def is_running(self, url: str) -> bool:
        return self._servers[url].is_running

    async def end(self, url: str) -> None:
        self._servers[url].is_running = False

    async def restart(self, url: str) -> None:
        server = self._servers[url]
        server.is_running, server.hangs = False, False
        server.num_starts += 1
        await asyncio.sleep(2.0)
        if url in self.broken:
            raise EngineFault("unreachable", "it ended at once")
        server.is_running, server.weights, server.claims = True, 0, None
        server.script.clear()
        self.on_start(server)


def answer(request: GenerationRequest, version: int, *, is_aborted: bool = False) -> Generation:
    """What weights of this version draw for this seed."""
    tokens = np.array([request.seed, version], dtype=np.int64)[: 1 if is_aborted else 2]
    logprobs = np.full(len(tokens), -0.5, dtype=np.float32)
    return Generation(request.id, tokens, logprobs, "abort" if is_aborted else "stop", version)


def requests_of(num_groups: int, group_size: int) -> tuple[list[GenerationRequest], list[int]]:
    pairs = list(itertools.product(range(num_groups), range(group_size)))
    prompt = np.array([1, 2], dtype=np.int64)
    requests = [GenerationRequest(f"{g}/{i}", prompt, seed, PARAMS) for seed, (g, i) in enumerate(pairs)]
    return requests, [group for group, _ in pairs]


class World:
    """A fleet of scripted servers, and what it said."""

    def __init__(self, num_servers: int, *, has_processes: bool = True, **settings: Any) -> None:
        self.servers = [ScriptedServer(f"http://server-{i}") for i in range(num_servers)]
        self.processes = ScriptedProcesses(self.servers)
        self.said: list[str] = []
        given = {
            "num_slots": 4,
            "request_timeout_seconds": 100.0,
            "step_timeout_seconds": 2000.0,
            "min_servers": 1,
            "max_restarts": 2,
        }
        self.settings = FleetSettings(**{**given, **settings})
        self.fleet = FleetCore(self.servers, self.settings, self.processes if has_processes else None, self.said.append)

    async def push(self, version: int) -> None:
        """An honest push of weights to all that are up."""
        for url in await self.fleet.targets():
            server = next(server for server in self.servers if server.url == url)
            problem = None if server.is_running and not server.hangs else "unreachable: no answer"
            if problem is None:
                server.weights = version
            await self.fleet.pushed(url, version, problem)

    async def start(self, version: int = 7) -> None:
        await self.fleet.open()
        await self.push(version)

    def state(self, place: int) -> str:
        return self.fleet.roster.servers[place].state

    async def until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            await asyncio.sleep(0.05)
