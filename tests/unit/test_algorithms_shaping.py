"""Rewards that are normalised and clipped, samples that count more than others, and the supervised term of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.losses import PolicyLoss
from megarl.algorithms.reward_scale import RewardScale
from megarl.algorithms.rewards import weigh_samples
from megarl.config.algorithms import GrpoSettings, PpoSettings
from megarl.core.world import World
from megarl.data.pack import PackPlan, pack
from megarl.metrics.meter import Meter
from tests.unit.one_rank import micro_of, one_rank_world, reported
from tests.unit.test_algorithms_credit import group_of

GROUPS = ([1.0, 0.0, 0.0, 1.0], [10.0, 0.0, 0.0, 0.0])


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def shaped(world: World, **settings: Any) -> tuple[list[list[float]], float]:
    groups = [group_of(rewards) for rewards in GROUPS]
    meter = Meter()
    RewardScale(PpoSettings(name="ppo", **settings)).shape(groups, meter)
    return (
        [[sample.shaped_reward for sample in group.samples] for group in groups],  # type: ignore[misc]
        reported(meter, world)["critic/reward_clip_frac"],
    )


def test_rewards_are_left_alone_unless_asked(world: World) -> None:
    assert shaped(world) == ([list(rewards) for rewards in GROUPS], 0.0)


@pytest.mark.parametrize("over", ["group", "batch"])
def test_normalised_rewards_average_zero_with_deviation_one(over: str, world: World) -> None:
    rewards, _ = shaped(world, normalize_rewards=over)
    for population in rewards if over == "group" else [rewards[0] + rewards[1]]:
        assert np.mean(population) == pytest.approx(0, abs=1e-9)
        assert np.std(population, ddof=1) == pytest.approx(1, rel=1e-5)  # 1e-6 in the denominator


def test_what_is_outside_the_limit_is_cut_off_and_counted(world: World) -> None:
    rewards, clipped = shaped(world, reward_clip=0.5)
    assert rewards == [[0.5, 0.0, 0.0, 0.5], [0.5, 0.0, 0.0, 0.0]]
    assert clipped == 3 / 8
    # (10 - 2.5) / 5 = 1.5 deviations is the only one beyond 1
    rewards, clipped = shaped(world, normalize_rewards="group", reward_clip=1.0)
    assert clipped == 1 / 8
    assert rewards[1][0] == 1.0


def test_equal_rewards_become_zero_not_nan(world: World) -> None:
    groups = [group_of([3.0, 3.0])]
    RewardScale(GrpoSettings(name="grpo", normalize_rewards="group")).shape(groups, Meter())
    assert [sample.shaped_reward for sample in groups[0].samples] == [0.0, 0.0]


def weights(*by: str) -> tuple[list[float], Meter]:
    groups = [group_of([1.0, 1.0, 0.0, 0.0], [1, 2, 4, 4]), group_of([0.0, -1.0], [2, 2])]
    meter = Meter()
    weigh_samples(groups, GrpoSettings(name="grpo", weight_samples_by=list(by)), meter)
    (batch,) = pack(groups, PackPlan(1, 1, 1000))
    packed = torch.cat([micro.sample_weight for micro in batch.microbatches()])
    assert float(packed.mean()) == pytest.approx(1)  # scaled over the whole optimizer step
    return [sample.weight for group in groups for sample in group.samples], meter


def test_samples_weigh_the_same_unless_asked(world: World) -> None:
    raw, meter = weights()
    assert raw == [1.0] * 6
    numbers = reported(meter, world)
    assert {numbers[f"actor/sample_weights_{name}"] for name in ("mean", "min", "max")} == {1.0}


def test_hard_prompts_and_short_responses_count_more(world: World) -> None:
    assert weights("difficulty")[0] == [1.25] * 4 + [2.0] * 2  # half of the first group is wrong, all of the second
    assert weights("length")[0] == [1.25, 1.0, 0.5, 0.5, 1.0, 1.0]  # of the longest, 4 tokens
    raw, meter = weights("difficulty", "length")
    assert raw == [1.25 * 1.25, 1.25, 0.625, 0.625, 2.0, 2.0]
    numbers = reported(meter, world)
    assert numbers["actor/sample_weights_max"] == 2.0
    assert numbers["actor/sample_weights_mean"] == pytest.approx(np.mean(raw))


def term(world: World, **sft: float) -> tuple[float, dict[str, float], torch.Tensor]:
    """Two tokens of a good sample and three of a bad one; advantages are 0, so only the supervised term is left."""
    settings = GrpoSettings(name="grpo", sft=sft)
    micro = micro_of([[0, 1, 1], [0, 1, 1, 1]], old_logprobs=torch.zeros(7), advantages=torch.zeros(7))
    micro.scores = torch.tensor([1.0, 0.0])
    micro.sft_weight = torch.tensor([1 / 2, 1 / 3])
    logprobs = torch.tensor([0.0, -1.0, -2.0, 0.0, -3.0, -3.0, -6.0], requires_grad=True)
    meter = Meter()
    loss = PolicyLoss.of(settings)(logprobs, torch.zeros(7), micro, meter)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), reported(meter, world), logprobs.grad


def test_the_supervised_term_is_a_mean_over_each_kind_of_sample(world: World) -> None:
    loss, numbers, gradient = term(world, coef=0.5, positive_weight=1.0, negative_weight=0.25)
    assert numbers["actor/positive_sft_loss"] == 1.5
    assert numbers["actor/negative_sft_loss"] == 4.0
    assert numbers["actor/sft_loss"] == pytest.approx(1.5 + 0.25 * 4.0)
    assert loss == pytest.approx(0.5 * 2.5)
    assert numbers["actor/total_loss"] == pytest.approx(loss)
    assert gradient.tolist() == pytest.approx([0, -0.25, -0.25, 0, -1 / 24, -1 / 24, -1 / 24])


def test_without_a_coefficient_there_is_no_supervised_term(world: World) -> None:
    loss, numbers, gradient = term(world)
    assert loss == 0
    assert not gradient.any()
    assert not any("sft" in name for name in numbers)
