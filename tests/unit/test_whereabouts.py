"""Parts of the work that take long in sum are told to the watchdog, each of them; see also tests/distributed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.checkpoint.store import open_checkpoint
from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import Group, Prompt, Sample
from megarl.launch.watch import RankState, Watch
from megarl.rewards.scorer import Scorer
from megarl.rollout.conversation import PolicyTurn
from megarl.rollout.rounds import Rounds
from tests.unit.checkpoints import save_layout, whole
from tests.unit.whereabouts_told import tells


def test_nothing_is_told_without_work() -> None:
    assert not tells(lambda: None)


@pytest.mark.parametrize("response", ["42", "no answer"], ids=["right", "wrong"])
def test_a_score_is_told(response: str) -> None:
    prompt = Prompt("p", "x", np.array([5, 6]), "42")
    sample = Sample(np.array([5, 6, 7]), np.array([0, 0, 1], np.int8), np.zeros(3, np.float32), "stop", response)
    with closing(Scorer([RewardSettings(name="exact_match")], ScoringSettings())) as scorer:
        assert tells(lambda: scorer.finish_all([Group(prompt, [sample])]))
        assert not tells(lambda: scorer.finish_all([]))


class _Talk:
    """A conversation whose function only does what the test does."""

    place = 0

    def start(self, rounds: Rounds) -> Callable[[], object]:
        return lambda: None

    def take(self, generation: Generation) -> PolicyTurn:
        return PolicyTurn("", len(generation.token_ids), generation.finish, 1)

    def time_out(self, seconds: float) -> None:
        """It has no sample to spoil."""


def test_turns_of_a_conversation_are_told() -> None:
    talk = _Talk()
    rounds = Rounds([talk], 1, 60.0)
    request = GenerationRequest("c/0", np.array([5]), 1, SamplingParams(4, 1.0, 1.0, 0, ()))

    def next_round() -> None:
        assert rounds.next() == [request]

    with rounds._changed:
        rounds._start_more(0.0)
    rounds._under_way[talk].since = float("inf")
    assert tells(lambda: rounds.ask(talk, request))
    assert not tells(next_round)
    assert tells(lambda: rounds.returned(talk, lambda _: None))


def test_a_conversation_that_is_given_up_is_told() -> None:
    assert tells(Rounds([_Talk()], 1, 0.01).next)


def test_who_waits_for_another_is_not_named() -> None:
    """Although the one that is to blame got on later."""
    watch = Watch({rank: RankState(rank, "here", 0.0, 0.0) for rank in range(2)}, 10.0)
    for rank in range(2):
        watch.ranks[rank].take({"step": 1, "phase": "reward/compute_rewards", "at": 1.0})
    watch.ranks[1].take({"waits": True, "at": 5.0})
    watch.ranks[0].take({"at": 4.0})
    for one in watch.ranks.values():
        one.take_status(one.to_status(5.0), 5.0)
    assert watch.judge(13.9) is None
    verdict = watch.judge(14.1)  # to wait is no progress
    assert verdict is not None and verdict.message.startswith("MRL-5301 rank 0 on here")


def test_parts_of_a_checkpoint_are_told(tmp_path: Path) -> None:
    saved = whole("w", torch.arange(6.0))
    assert tells(lambda: save_layout(tmp_path, 1, [[saved]]))
    checkpoint = open_checkpoint(tmp_path, 1)
    assert tells(checkpoint.names), "files are hashed before they are opened"
    assert tells(lambda: checkpoint.fill([whole("w", torch.zeros(6))]))
