"""Many conversations at once: whoever waits for the policy is answered together with all others who wait.

A conversation is *busy* while its function runs, *waiting* when it has asked for the policy's turn, and over when the
function returned, raised or took too long. A round takes all that wait. It begins when nobody is busy, or when nobody
has joined for a moment: one slow tool holds up nobody else for long. Who shares a round is a matter of timing, what is
drawn is not: draws depend on the tokens and the seed alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from megarl.core import whereabouts
from megarl.core.protocols import Generation, GenerationRequest
from megarl.rollout.conversation import Abandoned, PolicyTurn

# Busy ones may catch up for as long as somebody joins every so often, so that few rounds of many are made rather than
# many of few; but nobody waits longer than that.
_QUIET_SECONDS = 0.05
_MAX_WAIT_SECONDS = 0.5


@dataclass(slots=True)
class _UnderWay:
    """A conversation that is not over. ``since``: when it got busy, or began to wait."""

    since: float
    cancel: Callable[[], object]
    request: GenerationRequest | None = None
    turn: Future[PolicyTurn] | None = None
    # its function has returned; it is over as soon as its sample is made
    is_ending: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether its function runs."""
        return self.request is None and not self.is_ending


class Talk(Protocol):
    """A conversation, as rounds see it. ``place`` is its place among all."""

    place: int

    def start(self, rounds: Rounds) -> Callable[[], object]:
        """Start its function; the result cancels it, if that can be."""

    def take(self, generation: Generation) -> PolicyTurn:
        """Write down what the policy said, and put it into words."""

    def time_out(self, seconds: float) -> None:
        """It is over because it was busy for longer than ``seconds``."""


class Rounds:
    """The conversations of one call. The driver makes rounds of them; their functions call in from other threads."""

    def __init__(self, talks: Sequence[Talk], max_in_flight: int, timeout_seconds: float) -> None:
        self._changed = threading.Condition()
        self._queue = deque(talks)
        self._under_way: dict[Talk, _UnderWay] = {}
        self._max_in_flight = max_in_flight
        self._timeout_seconds = timeout_seconds
        # who has asked and has no answer yet, in the order in which they asked
        self._waiting: dict[Talk, None] = {}
        self._in_round: list[Talk] = []
        self._problem: BaseException | None = None
        # conversations that were given up because they took too long
        self.num_given_up = 0

    def next(self) -> list[GenerationRequest]:
        """The requests of the next round, in the order of the conversations; [] when all are over. Of the driver."""
        with self._changed:
            while True:
                now = time.monotonic()
                self._give_up_slow_ones(now)
                self._start_more(now)
                if self._problem is not None:
                    raise self._problem
                if not self._under_way:
                    return []
                begins = self._begins(now)
                if begins <= now:
                    self._in_round = sorted(self._waiting, key=lambda talk: talk.place)
                    requests = [self._under_way[talk].request for talk in self._in_round]
                    return [request for request in requests if request is not None]
                self._changed.wait(min(begins, self._next_deadline()) - now)

    def answer(self, generations: Sequence[Generation]) -> None:
        """What the policy said to the requests of the last round. Of the driver."""
        with self._changed:
            for talk, generation in zip(self._in_round, generations, strict=True):
                own = self._under_way.get(talk)
                if own is None or own.turn is None or own.is_ending:
                    continue  # its function returned although it had asked
                turn = talk.take(generation)
                del self._waiting[talk]
                future, own.request, own.turn, own.since = own.turn, None, None, time.monotonic()
                future.set_result(turn)
            self._in_round = []

    def close(self) -> None:
        """Nobody waits for what is left. Of the driver."""
        with self._changed:
            self._queue.clear()
            for talk in list(self._under_way):
                self._drop(talk).cancel()

    def ask(self, talk: Talk, request: GenerationRequest) -> Future[PolicyTurn]:
        """Wait for the policy. Of the conversation."""
        whereabouts.tick()
        with self._changed:
            own = self._mine(talk)
            turn: Future[PolicyTurn] = Future()
            turn.set_running_or_notify_cancel()  # who stops waiting for it cannot take it back
            own.request, own.turn, own.since = request, turn, time.monotonic()
            self._waiting[talk] = None
            if len(self._waiting) in (1, len(self._under_way)):  # the driver sleeps through the others
                self._changed.notify()
            return turn

    def require_turn(self, talk: Talk) -> None:
        """Raise unless it is the conversation's turn to do something. Of the conversation."""
        with self._changed:
            self._mine(talk)

    def returned(self, talk: Talk, end: Callable[[bool], None]) -> None:
        """The function is done: ``end`` makes the sample and hands it on. Of the conversation.

        It is told whether a question to the policy is still open.
        """
        whereabouts.tick()
        with self._changed:
            try:
                own = self._in_time(talk)
            except Abandoned:
                return
            has_asked, own.request, own.is_ending = own.request is not None, None, True
            self._waiting.pop(talk, None)
        try:
            end(has_asked)
        except BaseException as error:  # nobody is above a conversation's thread: the driver raises it
            self._problem = error
        finally:
            with self._changed:
                if talk in self._under_way:
                    self._drop(talk)
                if self._queue or self._problem or len(self._waiting) == len(self._under_way):
                    self._changed.notify()

    def _begins(self, now: float) -> float:
        """When the next round begins, as things stand."""
        if not self._waiting:
            return float("inf")
        if len(self._waiting) == len(self._under_way):
            return now
        first, last = (
            self._under_way[talk].since for talk in (next(iter(self._waiting)), next(reversed(self._waiting)))
        )
        return min(last + _QUIET_SECONDS, first + _MAX_WAIT_SECONDS)

    def _next_deadline(self) -> float:
        busy = [own.since for own in self._under_way.values() if own.is_busy]
        return min(busy, default=time.monotonic()) + self._timeout_seconds

    def _start_more(self, now: float) -> None:
        while self._queue and len(self._under_way) < self._max_in_flight:
            talk = self._queue.popleft()
            # it is under way before its function can call in
            own = self._under_way[talk] = _UnderWay(now, lambda: None)
            own.cancel = talk.start(self)

    def _mine(self, talk: Talk) -> _UnderWay:
        own = self._in_time(talk)
        if own.request is not None:
            raise RuntimeError("a conversation has one turn at a time: await generate before you call it again")
        return own

    def _in_time(self, talk: Talk) -> _UnderWay:
        """Late is late, whether or not the driver has noticed yet."""
        own = self._under_way.get(talk)
        if own is None or own.is_ending:
            raise Abandoned("nobody waits for this conversation any more")
        if own.is_busy and time.monotonic() - own.since > self._timeout_seconds:
            self._give_up(talk)
            raise Abandoned(f"the conversation was busy for more than {self._timeout_seconds:g} s")
        return own

    def _give_up_slow_ones(self, now: float) -> None:
        for talk, own in list(self._under_way.items()):
            if own.is_busy and now - own.since > self._timeout_seconds:
                self._give_up(talk)

    def _give_up(self, talk: Talk) -> None:
        whereabouts.tick()
        self.num_given_up += 1
        self._drop(talk).cancel()
        talk.time_out(self._timeout_seconds)
        self._changed.notify()

    def _drop(self, talk: Talk) -> _UnderWay:
        own = self._under_way.pop(talk)
        self._waiting.pop(talk, None)
        if own.turn is not None:
            own.turn.set_exception(Abandoned("nobody waits for this conversation any more"))
        return own
