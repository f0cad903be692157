"""What every road to servers has in common: a server as one push sees it, and the verbs of a road."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from megarl.core.bucket import NamedTensor
from megarl.core.engine_fault import EngineFault
from megarl.core.protocols import EngineKind, RemoteEngine

T = TypeVar("T")
_MAX_REASON = 400


class Server:
    """One server during one push. Its first problem is the verdict; nobody sends to it after that."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.engine = engine
        self.problem: str | None = None
        # it may be dead: SGLang dies of a payload that it cannot read. It is not spoken to again in this push.
        self.is_lost = False
        # it was paused: its weights may have been touched from then on
        self.is_paused = False
        # an update was begun and not ended
        self.is_open = False
        # it has the weights, and waits for the word to go on with its requests
        self.is_held = False
        self._kind: EngineKind | None = None

    @property
    def kind(self) -> EngineKind:
        """What it is; known once `learn_kind` has succeeded."""
        assert self._kind is not None, "asked before anything else"
        return self._kind

    async def learn_kind(self) -> None:
        """Ask it what it is."""
        self._kind = await self.engine.kind()

    async def attempt(self, what: str, call: Awaitable[T]) -> T | None:
        """The call's result. A failure becomes the server's problem, and never anybody else's."""
        try:
            return await call
        except EngineFault as fault:
            self.is_lost |= fault.kind in ("unreachable", "timeout")
            self.blame(f"{what}: {fault}")
        except Exception as error:
            self.blame(f"{what}: {error!r}")
        return None

    def blame(self, problem: str) -> None:
        """Something went wrong; the first of all problems is kept."""
        if self.problem is None:
            self.problem = problem[:_MAX_REASON]

    async def control(self, route: str, body: Mapping[str, Any], timeout: float) -> Any:
        """A control call that also raises `EngineFault` if the server says that it did not succeed."""
        answer = await self.engine.control(route, body, timeout)
        if isinstance(answer, Mapping) and answer.get("success") is False:
            raise EngineFault("refused", f"{route}: {str(answer.get('message'))[:200]}")
        return answer


class Road(Protocol):
    """A way for buckets. `load` runs in the trainer's thread while the bucket before it is carried in the loop's."""

    # of the buckets that it carries fastest
    bucket_bytes: int
    # for one call to one server
    timeout_seconds: float
    # engines take buckets as they come, inside an update session; otherwise all at once with the last one
    streams: bool

    def load(self, bucket: Sequence[NamedTensor], servers: Sequence[Server], /) -> Any:
        """Make a bucket ready to be carried. What was loaded two calls ago has been carried."""

    async def carry(self, parcel: Any, servers: Sequence[Server], version: str | None, /) -> None:
        """Bring what was loaded to all servers, the version with the last. Failures become the servers' problems."""

    async def close(self, servers: Sequence[Server], /) -> None:
        """The push is over, well or not: give back what it took."""


async def of_each(servers: Sequence[Server], what: str, calls: Sequence[Awaitable[Any]]) -> None:
    """One call to each server, all at once."""
    await asyncio.gather(*(server.attempt(what, call) for server, call in zip(servers, calls, strict=True)))


def live(servers: Sequence[Server]) -> list[Server]:
    """Those without a problem."""
    return [server for server in servers if server.problem is None]


def update_options(version: str | None) -> dict[str, Any]:
    """What every bucket says besides its contents: the cache was flushed, or must stay; the last brings the version."""
    options: dict[str, Any] = {"flush_cache": False, "abort_all_requests": False}
    return options if version is None else {**options, "weight_version": version}
