"""Rewards normalised over the whole run: what is remembered, and that a checkpoint keeps it to the last bit."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.choose import build_algorithm
from megarl.algorithms.reward_scale import Moments, RewardScale
from megarl.config.algorithms import GrpoSettings, PpoSettings
from megarl.core.protocols import Remembers
from megarl.core.sample import Group
from megarl.metrics.meter import Meter
from tests.unit.groups import group_with, sample_with

NUMBERS = st.lists(st.floats(-1e3, 1e3), max_size=30)


def step(*rewards: float) -> list[Group]:
    return [group_with([sample_with(reward) for reward in rewards])]


def shaped(scale: RewardScale, groups: list[Group]) -> list[float]:
    scale.shape(groups, Meter())
    return [sample.shaped_reward for group in groups for sample in group.samples]  # type: ignore[misc]


@given(parts=st.lists(NUMBERS, min_size=1, max_size=6))
def test_moments_of_parts_are_those_of_the_whole(parts: list[list[float]]) -> None:
    merged = Moments()
    for part in parts:
        merged = merged.merged(Moments.of(np.array(part)))
    everything = np.array([number for part in parts for number in part])
    assert merged.count == len(everything)
    if len(everything):
        # a sum of 180 numbers below 1e3, and of their squares, in another order
        assert merged.mean == pytest.approx(everything.mean(), rel=1e-9, abs=1e-9)
        assert merged.squares == pytest.approx(np.square(everything - everything.mean()).sum(), rel=1e-9, abs=1e-6)


def test_rewards_are_normalised_by_all_that_came_before_and_their_own_step() -> None:
    scale = RewardScale(PpoSettings(name="ppo", normalize_rewards="running"))
    shaped(scale, step(0.0, 2.0))
    shaped(scale, [])  # filters left nothing
    seen = np.array([0.0, 2.0, 10.0, 4.0])
    expected = (seen[2:] - seen.mean()) / (seen.std(ddof=1) + 1e-6)
    assert shaped(scale, step(10.0, 4.0)) == pytest.approx(expected.tolist(), rel=1e-12)  # rounding of float64


def test_equal_rewards_become_zero_and_a_single_one_too() -> None:
    scale = RewardScale(PpoSettings(name="ppo", normalize_rewards="running"))
    assert shaped(scale, step(3.0)) == [0.0]
    assert shaped(scale, step(3.0, 3.0)) == [0.0, 0.0]


@pytest.mark.parametrize(
    "settings",
    [GrpoSettings(name="grpo", normalize_rewards="running"), PpoSettings(name="ppo", normalize_rewards="running")],
)
def test_a_resumed_run_goes_on_with_the_same_bits(settings: GrpoSettings | PpoSettings) -> None:
    def algorithm() -> Remembers:
        made = build_algorithm(settings)
        assert isinstance(made, Remembers)
        return made

    def learn(who: Remembers, *rewards: float) -> list[float | None]:
        groups = step(*rewards)
        who.credit_groups(groups, Meter())  # type: ignore[attr-defined]
        return [sample.shaped_reward for sample in groups[0].samples]

    whole, first = algorithm(), algorithm()
    for who in (whole, first):
        learn(who, 0.1, 0.7, 1 / 3)
    second = algorithm()
    # as a checkpoint has it: tensors
    second.restore({name: torch.from_numpy(array).clone().numpy() for name, array in first.state().items()})
    assert learn(second, 0.2, 0.9) == learn(whole, 0.2, 0.9)
    fresh = algorithm()
    fresh.restore({})
    assert fresh.state() == {}


def test_nothing_is_remembered_unless_asked() -> None:
    made = build_algorithm(GrpoSettings(name="grpo"))
    made.credit_groups(step(0.0, 1.0), Meter())
    assert isinstance(made, Remembers)
    assert made.state() == {}
    assert not isinstance(SimpleNamespace(), Remembers)
