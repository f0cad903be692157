"""One push from one courier to its servers: pause, flush, begin, buckets, end, proof, continue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from megarl.core.bucket import NamedTensor
from megarl.core.engine_fault import EngineFault
from megarl.core.errors import MegarlError
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import PauseMode
from megarl.weights.attest import Attestor
from megarl.weights.road import Road, Server, live, of_each
from megarl.weights.tally import Tally

# the first SGLang that wants updates inside a session
_SESSIONS_SINCE = (0, 5, 21)


class Delivery:
    """Its calls never raise: what goes wrong becomes the problem of the servers that it concerns, and what is wrong
    with the road itself, like a full disk, is kept in ``error``. So the trainer can always export to the end.
    """

    def __init__(self, servers: Sequence[Server], road: Road, attestor: Attestor, loop: LoopThread) -> None:
        self._servers = servers
        self._road = road
        self._attestor = attestor
        self._loop = loop
        self._mode: PauseMode = "retract"
        self._under_way: Future[None] | None = None
        self._is_prepared = False
        self.error: MegarlError | None = None

    def begin(self, mode: PauseMode) -> None:
        """Get to know the servers. They still serve."""
        self._mode = mode
        with self._blaming_all():
            self._loop.run(self._for_each("the greeting", self._meet))

    def take(self, bucket: Sequence[NamedTensor], tally: Tally, is_last: bool) -> None:
        """Send a bucket on its way. The one before has arrived when this returns; this one has not."""
        servers = live(self._servers)
        if not servers:
            return
        with self._blaming_all():
            parcel = self._road.load(bucket, servers)
            self._wait()
            self._under_way = self._loop.submit(self._carry(parcel, str(tally.version) if is_last else None))
            # while it travels
            tally.add(bucket)

    def finish(self, tally: Tally) -> None:
        """End the update everywhere, and compare. Afterwards the servers' problems are the verdicts."""
        if not self._servers:
            return  # not a courier: the road, which may be a shared disk, is somebody else's
        with self._blaming_all():
            self._wait()
        with self._blaming_all():
            self._loop.run(self._for_each("", lambda server: self._conclude(server, tally)))
        with self._blaming_all():
            self._loop.run(self._road.close(self._servers))

    def let_go(self) -> None:
        """Requests that were paused in place go on, now that the fleet knows which weights draw the rest of them."""
        held = [server for server in live(self._servers) if server.is_held]
        with self._blaming_all():
            self._loop.run(of_each(held, "continue", [server.engine.continue_generation() for server in held]))

    @contextlib.contextmanager
    def _blaming_all(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, MegarlError):
                self.error = self.error or error
            for server in self._servers:
                server.blame(f"the road: {error!r}")

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    async def _for_each(self, what: str, step: Any) -> None:
        await asyncio.gather(*(server.attempt(what, step(server)) for server in self._servers))

    async def _meet(self, server: Server) -> None:
        await server.learn_kind()
        await self._attestor.before(server)

    async def _carry(self, parcel: Any, version: str | None) -> None:
        if not self._is_prepared and (self._road.streams or version is not None):
            self._is_prepared = True
            servers = live(self._servers)
            await asyncio.gather(*(self._prepare(server) for server in servers))
        await self._road.carry(parcel, live(self._servers), version)

    async def _prepare(self, server: Server) -> None:
        """Nothing may be drawn from weights that are half new."""
        server.is_paused = True
        await server.attempt("pause", server.engine.pause(self._mode))
        timeout = self._road.timeout_seconds
        # requests that were paused in place need the cache; all others must not find what old weights computed
        if server.problem is None and self._mode != "in_place":
            await server.attempt("flush_cache", server.control("/flush_cache", {}, timeout))
        if server.problem is None and self._road.streams and _has_sessions(server):
            await server.attempt("begin_weight_update", self._begin(server))

    async def _begin(self, server: Server) -> None:
        timeout = self._road.timeout_seconds
        try:
            await server.control("/begin_weight_update", {}, timeout)
        except EngineFault as fault:
            if fault.kind != "refused" or server.kind.name == "embedded":
                raise
            # a sender died in the middle of its update, and SGLang still waits for the rest of it
            await server.control("/end_weight_update", {}, timeout)
            await server.control("/begin_weight_update", {}, timeout)
        server.is_open = True

    async def _conclude(self, server: Server, tally: Tally) -> None:
        if server.is_lost:
            return
        if server.is_open:
            # also after a failure: SGLang refuses the next update as long as this one is open
            await server.attempt(
                "end_weight_update", server.control("/end_weight_update", {}, self._road.timeout_seconds)
            )
        if server.problem is None:
            is_proven = await server.attempt("the proof", self._attestor.while_paused(server, tally))
            server.is_held = bool(is_proven) and self._mode == "in_place"
            if server.problem is None and not server.is_held:
                await server.attempt("continue", server.engine.continue_generation())
            if server.problem is None and not is_proven:
                await server.attempt("the proof", self._attestor.while_serving(server, tally))
        if server.problem is not None and server.is_paused and not server.is_lost:
            # It stays paused, for its weights are not to be trusted. What ran on it ends with what it has.
            with contextlib.suppress(EngineFault):
                await server.engine.pause("in_place")
                await server.engine.abort()


def _has_sessions(server: Server) -> bool:
    return server.kind.name == "embedded" or server.kind.version >= _SESSIONS_SINCE
