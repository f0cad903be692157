"""Requests in, answers out, by engines that have the right weights: what rollouts and evaluations have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from megarl.core.protocols import Batch, Fleet, Generation, GenerationRequest, OnServed, Served, Servers, Statistics
from megarl.core.world import World
from megarl.metrics.meter import Meter

GENERATE = "actor_infer/generate"
SCORE = "reward/compute_rewards"

# enters a phase: the block runs with what the phase needs on the device, and is measured
Enter = Callable[[str, Meter], AbstractContextManager[None]]
# makes the engines serve the trainer's weights under this version, if they do not yet; collective
Refresh = Callable[[int, Meter], None]


class Serving(Protocol):
    """Engines with the weights of a version."""

    def generate(
        self,
        version: int,
        requests: Sequence[GenerationRequest],
        timer: str,
        meter: Meter,
        statistics: Statistics,
        on_served: OnServed | None = None,
    ) -> list[Generation]:
        """The driver's requests, answered by weights ``version``; in their order on the driver, [] elsewhere.

        Generating counts as ``timer``; what the engines say of themselves goes to ``statistics``. Whoever can tells
        ``on_served`` of each answer while others are still being drawn. Collective.
        """

    def report(self, statistics: Statistics) -> None:
        """What servers went through since the last time."""


class InRankServing:
    """One engine inside each rank."""

    def __init__(self, fleet: Fleet, refresh: Refresh, enter: Enter) -> None:
        self._fleet = fleet
        self._refresh = refresh
        self._enter = enter

    def generate(
        self,
        version: int,
        requests: Sequence[GenerationRequest],
        timer: str,
        meter: Meter,
        statistics: Statistics,
        on_served: OnServed | None = None,  # noqa: ARG002  (the cores are busy drawing, and most answers elsewhere)
    ) -> list[Generation]:
        """See `Serving`."""
        self._refresh(version, meter)
        with meter.timed(timer), self._enter(GENERATE, meter):
            return self._fleet.generate(requests, statistics)

    def report(self, statistics: Statistics) -> None:
        """Nothing: there are no servers."""


class ServerServing:
    """Servers, which the driver talks to. If all are lost on the way, those that come back get weights and go on."""

    def __init__(self, servers: Servers | None, refresh: Refresh, enter: Enter, world: World) -> None:
        self._servers = servers
        self._refresh = refresh
        self._enter = enter
        self._world = world
        # oldest first, the same on every rank
        self._under_way: list[Pending] = []

    @property
    def is_busy(self) -> bool:
        """Whether requests are under way; the same on every rank."""
        return bool(self._under_way)

    def refresh(self, version: int, meter: Meter) -> None:
        """Make the servers serve the trainer's weights, which are ``version``. Collective."""
        self._refresh(version, meter)

    def generate(
        self,
        version: int,
        requests: Sequence[GenerationRequest],
        timer: str,
        meter: Meter,
        statistics: Statistics,  # noqa: ARG002  (what servers go through is reported with the step's samples)
        on_served: OnServed | None = None,
    ) -> list[Generation]:
        """See `Serving`. What is under way for others is finished first, by the weights that it was begun with."""
        for earlier in list(self._under_way):
            self.finish(earlier, version, timer, meter)
        self._refresh(version, meter)
        pending = Pending(requests, _by_prompt(requests), range(version, version + 1), on_served=on_served)
        self.begin(pending)
        self.finish(pending, version, timer, meter)
        return [generation for generation in pending.generations if generation is not None]

    def begin(self, pending: Pending) -> None:
        """Ask the servers, in the background. Every rank must begin the same."""
        self._under_way.append(pending)
        self._ask(pending)

    def finish(self, pending: Pending, version: int, timer: str, meter: Meter) -> None:
        """Wait for the answers; ``version`` is what the trainer could push now, should it have to. Collective."""
        while pending in self._under_way:
            with meter.timed(timer), self._enter(GENERATE, meter):
                needs_push = self._world.broadcast(pending.take() if self._servers is not None else None)
            if needs_push:
                self._refresh(version, meter)
                self._ask(pending)
            else:
                self._under_way.remove(pending)

    def report(self, statistics: Statistics) -> None:
        """What the servers went through since the last time."""
        if self._servers is not None:
            self._servers.report(statistics)

    def _ask(self, pending: Pending) -> None:
        if self._servers is not None:
            pending.ask(self._servers)


class Pending:
    """Requests, and those of their answers that are there. Other ranks than the driver have none of either.

    With ``num_groups``, only so many groups are waited for. ``on_served`` is told of each answer as it comes, from
    another thread.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        groups: Sequence[int],
        versions: range,
        num_groups: int | None = None,
        on_served: OnServed | None = None,
    ) -> None:
        self._requests = requests
        self._on_served = on_served
        self._groups = groups
        self._versions = versions
        self._num_groups = num_groups
        self._asked: list[int] = []
        self._batch: Batch | None = None
        self.generations: list[Generation | None] = [None] * len(requests)

    def ask(self, servers: Servers) -> None:
        """Submit what has no answer yet."""
        self._asked = places = [i for i, generation in enumerate(self.generations) if generation is None]
        tell = self._on_served
        self._batch = servers.submit(
            [self._requests[i] for i in places],
            [self._groups[i] for i in places],
            self._versions,
            None if tell is None else lambda i, generation: tell(places[i], generation),
        )

    def take(self) -> bool:
        """Wait, and keep what arrives; whether servers need weights before the rest can be served."""
        assert self._batch is not None, "asked before"
        wanted = None if self._num_groups is None else self._num_groups - self._num_whole_groups()
        served: Served = self._batch.wait(wanted)
        for i, generation in zip(self._asked, served.generations, strict=True):
            self.generations[i] = generation
        return served.needs_push

    def _num_whole_groups(self) -> int:
        """Groups of which everything is there already: those that are asked for again are not."""
        missing = {group for group, one in zip(self._groups, self.generations, strict=True) if one is None}
        return len(set(self._groups) - missing)


def _by_prompt(requests: Sequence[GenerationRequest]) -> list[int]:
    """A number for each run of requests with one prompt."""
    numbers: list[int] = []
    for i, request in enumerate(requests):
        same = i > 0 and request.token_ids is requests[i - 1].token_ids
        numbers.append(numbers[-1] if same else len(numbers))
    return numbers
