"""Which relay the next worker goes to: they take turns, and one that is lost gets no work for a while."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Sequence

from megarl.rewards.outcome import RELAY_IS_LOST
from megarl.rewards.relay_link import Relay

logger = logging.getLogger(__name__)

_SECONDS_TO_REST = 60.0


class RelayTurns:
    """One for all pools of a process, whose threads call it."""

    def __init__(self) -> None:
        self._turns = itertools.count()
        self._lock = threading.Lock()
        # when each was last found to be lost; it is listed until it answers again
        self._lost: dict[Relay, float] = {}

    def next(self, places: Sequence[Relay]) -> Relay:
        """The next that does not rest; if all do, the next all the same: then somebody has to say so."""
        usable = self._usable(places) or places
        return usable[next(self._turns) % len(usable)]

    def has_one(self, places: Sequence[Relay]) -> bool:
        """Whether one of them does not rest."""
        return bool(self._usable(places))

    def lose(self, relay: Relay, why: str) -> None:
        """A worker's way to this relay is lost. Told once, however many workers were there."""
        with self._lock:
            is_known = relay in self._lost
            self._lost[relay] = time.monotonic()
        if not is_known:
            logger.warning(
                "%s the relay for reward workers at %s:%d is lost: %s. Its samples go to other workers, if there are "
                "any; it is tried again after %g s. Look at that machine and its network.",
                *(RELAY_IS_LOST.code, relay.host, relay.port, why, _SECONDS_TO_REST),
            )

    def find(self, relay: Relay) -> None:
        """A worker is ready there."""
        with self._lock:
            was_lost = self._lost.pop(relay, None) is not None
        if was_lost:
            logger.info("the relay for reward workers at %s:%d answers again", relay.host, relay.port)

    def _usable(self, places: Sequence[Relay]) -> list[Relay]:
        now = time.monotonic()
        with self._lock:
            return [place for place in places if now - self._lost.get(place, -math.inf) >= _SECONDS_TO_REST]


turns = RelayTurns()
