"""One push from one courier to its servers: pause, flush, begin, buckets, end, proof, continue."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import asyncio
import contextlib

from megarl.core.bucket import NamedTensor
from megarl.core.engine_fault import EngineFault
from megarl.core.errors import MegarlError
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import PauseMode
from megarl.weights.attest import Attestor
from megarl.weights.road import Road, Server, live
from megarl.weights.tally import Tally

# the first SGLang that wants updates inside a session
_SESSIONS_SINCE = (0, 5, 21)


class Delivery:
    """Its calls never raise: what goes wrong becomes the problem of the servers that it concerns, and what concerns all
    of them, like a full disk, is kept in ``error``. The trainer can always export to the end.
    """

    def __init__(
        self, servers: Sequence[Server], road: Road, attestor: Attestor, loop: LoopThread, mode: PauseMode, version: int
    ) -> None:
        self._servers = servers
        self._road = road
        self._attestor = attestor
        self._loop = loop
        self._mode: PauseMode = mode
        self._tally = Tally(version)
        self._under_way: Future[None] | None = None
        self._is_prepared = False
        self.error: MegarlError | None = None
        with self._blaming_all():
            self._loop.run(self._meet())

    def take(self, bucket: Sequence[NamedTensor], is_last: bool) -> None:
        """Send a bucket on its way. The one before may still be under way when this returns; no other is."""
        if not live(self._servers):
            return
        with self._blaming_all():
            parcel = self._road.load(bucket, live(self._servers))
            self._wait()
            self._under_way = self._loop.submit(self._carry(parcel, is_last))
            self._tally.add(bucket)

    def finish(self) -> Tally:
        """End the update everywhere, and compare. Afterwards the servers' problems are the verdicts."""
        with self._blaming_all():
            self._wait()
        with self._blaming_all():
            self._loop.run(self._finish())
        return self._tally

    @contextlib.contextmanager
    def _blaming_all(self):  # type: ignore[no-untyped-def]
        ...
