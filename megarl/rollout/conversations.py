"""Prompts answered by conversations with a tool or an environment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

from megarl.core.protocols import GenerationRequest, Statistics
from megarl.core.sample import Group
from megarl.core.seeding import derive_seed
from megarl.core.world import World
from megarl.data.encoder import PromptEncoder
from megarl.metrics.meter import Meter
from megarl.rollout.answering import Questions
from megarl.rollout.converse import Converse
from megarl.rollout.rounds import Rounds
from megarl.rollout.serving import GENERATE, Enter, Serving
from megarl.rollout.talk import Opening, TalkLimits, UserTalk

# Conversations that are under way at the same time. A plain function has a thread in each.
MAX_IN_FLIGHT = 512


class Conversations:
    """All conversations of a call at once, in rounds of generation that every rank takes part in."""

    def __init__(
        self,
        converse: Converse | None,
        serving: Serving,
        encoder: PromptEncoder,
        limits: TalkLimits,
        enter: Enter,
        world: World,
        max_in_flight: int = MAX_IN_FLIGHT,
    ) -> None:
        """Ranks other than the driver have no ``converse``."""
        self._converse = converse
        self._serving = serving
        self._encoder = encoder
        self._limits = limits
        self._max_in_flight = max_in_flight
        self._enter = enter
        self._world = world

    def answer(
        self, questions: Sequence[Questions], version: int, timer: str, meter: Meter, statistics: Statistics
    ) -> list[list[Group]]:
        """See `Answering`."""
        talks = self._talks(questions)
        rounds = Rounds(talks, self._max_in_flight, self._limits.tool_timeout_seconds)
        try:
            # Before the first round engines may have no weights, so that it cannot be their phase yet; there is nothing
            # to wait for either but the functions' first lines.
            requests = self._next(rounds, nullcontext(), timer, meter)
            while requests is not None:
                rounds.answer(self._serving.generate(version, requests, timer, meter, statistics))
                requests = self._next(rounds, self._enter(GENERATE, meter), timer, meter)
        finally:
            rounds.close()
            if self._converse is not None and rounds.num_given_up:
                self._converse.replace_blocked_loop()
        return _groups(questions, talks, statistics)

    def report(self, statistics: Statistics) -> None:
        """See `Answering`."""
        self._serving.report(statistics)

    def _talks(self, questions: Sequence[Questions]) -> list[UserTalk]:
        """In the order of questions, prompts and samples."""
        if self._converse is None:
            return []
        openings = [
            (f"{one.name}/{row}/{column}", prompt, derive_seed(*one.seed_parts, row, column), one)
            for one in questions
            for row, prompt in enumerate(one.prompts)
            for column in range(one.num_samples)
        ]
        return [
            UserTalk(
                Opening(place, name, prompt, seed, one.params, one.on_sample),
                self._converse,
                self._encoder,
                self._limits,
            )
            for place, (name, prompt, seed, one) in enumerate(openings)
        ]

    def _next(
        self, rounds: Rounds, phase: AbstractContextManager[None], timer: str, meter: Meter
    ) -> list[GenerationRequest] | None:
        """The next round's requests on the driver, [] elsewhere; None if there is no other round. Collective."""
        with meter.timed(timer), phase:
            requests = rounds.next()
            return requests if self._world.broadcast(bool(requests)) else None


def _groups(questions: Sequence[Questions], talks: Sequence[UserTalk], statistics: Statistics) -> list[list[Group]]:
    """The finished conversations, as they were asked for."""
    finished = iter(talks)
    answered = []
    for one in questions:
        groups = []
        for prompt in one.prompts:
            own = list(islice(finished, one.num_samples))
            samples = [talk.sample for talk in own if talk.sample is not None]
            assert len(samples) == len(own), "rounds end when all conversations are over"
            groups.append(Group(prompt, samples))
            _report_times(own, statistics)
        answered.append(groups)
    return answered


def _report_times(talks: Sequence[UserTalk], statistics: Statistics) -> None:
    """Seconds of each conversation, and of all about one prompt."""
    whole = max(talk.ended for talk in talks) - min(talk.began for talk in talks)
    for name, seconds in (*(("run", talk.ended - talk.began) for talk in talks), ("task", whole)):
        statistics.mean(f"rollout/time/{name}_execution/mean", seconds, 1)
        statistics.max(f"rollout/time/{name}_execution/max", seconds)
        statistics.min(f"rollout/time/{name}_execution/min", seconds)
