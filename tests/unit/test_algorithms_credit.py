"""Who gets how much credit: GRPO's groups, PPO's token rewards, values and whitening; the choice of an algorithm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from megarl.algorithms.choose import build_algorithm
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.ppo import Ppo
from megarl.algorithms.sft import Sft
from megarl.config.algorithms import CustomAlgorithm, GrpoSettings, PpoSettings, SftSettings
from megarl.core.batch import MicroBatch, MiniBatch, TrainBatch
from megarl.core.errors import ConfigError
from megarl.core.sample import Group, Prompt, Sample
from megarl.core.world import World
from megarl.data.pack import PackPlan, pack
from megarl.metrics.meter import Meter
from tests.unit.one_rank import micro_of, one_rank_world, reported


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def group_of(rewards: list[float], lengths: list[int] | None = None, name: str = "p") -> Group:
    generator = np.random.default_rng(1)
    samples = []
    for reward, length in zip(rewards, lengths or [2] * len(rewards), strict=True):
        mask = np.array([0] + [1] * length, dtype=np.int8)
        ids = generator.integers(0, 50, length + 1)
        samples.append(Sample(ids, mask, np.zeros(length + 1, dtype=np.float32), "stop", reward=reward))
    return Group(Prompt(name, "", np.zeros(1, dtype=np.int64)), samples)


def grpo_credit(rewards: list[float], **settings: Any) -> list[float]:
    group = group_of(rewards)
    Grpo(GrpoSettings(name="grpo", **settings)).credit_groups([group], Meter())
    return [sample.advantage for sample in group.samples]


def batch_of(*microbatches: MicroBatch) -> TrainBatch:
    return TrainBatch([MiniBatch(list(microbatches), 0, 0)])


# -- GRPO


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], [math.sqrt(0.75), -math.sqrt(0.75), -math.sqrt(0.75), math.sqrt(0.75)]),
        ([1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]),
        ([-4.0, 4.0], [-math.sqrt(0.5), math.sqrt(0.5)]),
    ],
)
def test_grpo_divides_by_the_sample_deviation(rewards: list[float], expected: list[float]) -> None:
    # 1e-6 is added to the deviation, so the ratio is off by up to two parts in a million
    assert grpo_credit(rewards) == pytest.approx(expected, rel=3e-6)


def test_grpo_without_the_deviation() -> None:
    assert grpo_credit([1.0, 2.0, 6.0], normalize_by_std=False) == [-2.0, -1.0, 3.0]


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.1] * 3, [5.0]], ids=["equal", "inexact", "group of one"])
def test_a_group_without_differences_teaches_nothing(rewards: list[float]) -> None:
    # the mean of three 0.1 is not exactly 0.1
    assert grpo_credit(rewards) == pytest.approx([0.0] * len(rewards), abs=1e-9)


def test_groups_are_judged_apart(world: World) -> None:
    groups = [group_of([0.0, 1.0]), group_of([100.0, 101.0]), group_of([7.0, 7.0])]
    meter = Meter()
    Grpo(GrpoSettings(name="grpo")).credit_groups(groups, meter)
    first, second, third = ([sample.advantage for sample in group.samples] for group in groups)
    assert first == second
    assert third == [0.0, 0.0]
    numbers = reported(meter, world)
    assert numbers["critic/score/mean"] == pytest.approx(216 / 6)
    assert (numbers["critic/score/min"], numbers["critic/score/max"]) == (0.0, 101.0)
    assert numbers["rollout/zero_variance_group_ratio"] == pytest.approx(1 / 3)


def test_an_unscored_sample_is_never_a_zero() -> None:
    group = group_of([1.0, 0.0])
    group.samples[1].reward = None
    with pytest.raises(AssertionError, match="without a reward"):
        Grpo(GrpoSettings(name="grpo")).credit_groups([group], Meter())


def test_grpo_spreads_credit_over_own_tokens(world: World) -> None:
    micro = micro_of([[0, 1, 1], [0, 1, 0, 1]], credit=torch.tensor([2.0, -1.0]), old_logprobs=torch.zeros(7))
    Grpo(GrpoSettings(name="grpo")).credit_tokens(batch_of(micro), world, Meter())
    assert micro.advantages is not None
    assert micro.advantages.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0, 0.0, -1.0]


def kl_micro() -> MicroBatch:
    mask = torch.tensor([0.0, 1, 1, 0, 1, 0, 1])
    old, reference = -torch.arange(1.0, 8) * mask, -torch.arange(1.0, 8) * mask - 0.5 * mask
    return micro_of(
        [[0, 1, 1], [0, 1, 0, 1]], credit=torch.tensor([2.0, -1.0]), rewards=torch.tensor([10.0, 20.0]),
        old_logprobs=old, ref_logprobs=reference, values=torch.zeros(7),
    )  # fmt: skip


def test_grpo_takes_the_kl_from_the_reward_or_from_the_loss(world: World) -> None:
    meter = Meter()
    micro = kl_micro()
    kl = {"coef": 0.2, "estimator": "k1", "apply_to": "reward"}
    Grpo(GrpoSettings(name="grpo", kl=kl)).credit_tokens(batch_of(micro), world, meter)
    assert micro.advantages is not None
    # old - reference = 0.5 on every own token: each pays 0.1
    assert micro.advantages.tolist() == pytest.approx([0.0, 1.9, 1.9, 0.0, -1.1, 0.0, -1.1])
    assert reported(meter, world)["critic/rewards/mean"] == pytest.approx((10 - 0.2 + 20 - 0.2) / 2)

    micro = kl_micro()
    algorithm = Grpo(GrpoSettings(name="grpo", kl={**kl, "apply_to": "loss"}))
    algorithm.credit_tokens(batch_of(micro), world, Meter())
    assert micro.advantages is not None and micro.old_logprobs is not None
    assert micro.advantages.tolist() == [0.0, 2.0, 2.0, 0.0, -1.0, 0.0, -1.0]
    loss = algorithm.policy_loss(micro.old_logprobs, torch.zeros(7), micro, Meter())
    assert float(loss) == pytest.approx(-(2 + 2 - 1 - 1) / 4 + 0.2 * 0.5)


@pytest.mark.parametrize("apply_to", ["loss", "reward"])
def test_the_kl_is_never_counted_twice(apply_to: str, world: World) -> None:
    kl = {"coef": 0.2, "estimator": "k1", "apply_to": apply_to}
    for algorithm in (Grpo(GrpoSettings(name="grpo", kl=kl)), Ppo(PpoSettings(name="ppo", kl=kl))):
        micro = kl_micro()
        algorithm.credit_tokens(batch_of(micro), world, Meter())
        assert micro.old_logprobs is not None
        meter = Meter()
        total = algorithm.policy_loss(micro.old_logprobs, torch.zeros(7), micro, meter)
        in_loss = float(total) - reported(meter, world)["actor/pg_loss"]
        assert in_loss == pytest.approx(0.1 if apply_to == "loss" else 0.0, abs=1e-6)


# -- PPO


def ppo_micro() -> MicroBatch:
    """A plain response, one with a tool's answer inside and after it, and one without any own token."""
    masks = [[0, 1, 1], [0, 1, 0, 1, 0], [0, 0]]
    return micro_of(
        masks, rewards=torch.tensor([1.0, 5.0, 9.0]), values=torch.zeros(10), old_logprobs=torch.zeros(10),
    )  # fmt: skip


def test_ppo_rewards_arrive_with_the_last_own_token(world: World) -> None:
    micro = ppo_micro()
    settings = PpoSettings(name="ppo", gamma=1.0, gae_lambda=0.0, whiten_advantages=False)
    Ppo(settings).credit_tokens(batch_of(micro), world, Meter())
    # lambda 0 and values 0: advantages are the token rewards themselves
    assert micro.advantages is not None
    assert micro.advantages.tolist() == [0, 0, 1, 0, 0, 0, 5, 0, 0, 0]


def test_ppo_rewards_less_the_penalty(world: World) -> None:
    micro = ppo_micro()
    own = micro.loss_mask
    micro.old_logprobs, micro.ref_logprobs = -1.0 * own, -1.25 * own
    settings = PpoSettings(
        name="ppo", gamma=1.0, gae_lambda=0.0, whiten_advantages=False,
        kl={"coef": 2.0, "estimator": "k1", "apply_to": "reward"},
    )  # fmt: skip
    meter = Meter()
    Ppo(settings).credit_tokens(batch_of(micro), world, meter)
    assert micro.advantages is not None
    assert micro.advantages.tolist() == [0, -0.5, 0.5, 0, -0.5, 0, 4.5, 0, 0, 0]
    assert reported(meter, world)["critic/rewards/mean"] == pytest.approx((0 + 4 + 9) / 3)


def test_ppo_whitens_advantages_and_not_returns(world: World) -> None:
    plain, white = ppo_micro(), ppo_micro()
    values = torch.linspace(-1, 1, 10)
    plain.values, white.values = values * plain.loss_mask, values * white.loss_mask
    Ppo(PpoSettings(name="ppo", whiten_advantages=False)).credit_tokens(batch_of(plain), world, Meter())
    meter = Meter()
    Ppo(PpoSettings(name="ppo")).credit_tokens(batch_of(white), world, meter)
    assert plain.returns is not None and white.returns is not None
    assert plain.advantages is not None and white.advantages is not None
    assert torch.equal(plain.returns, white.returns)
    own = white.loss_mask.bool()
    assert float(white.advantages[own].mean()) == pytest.approx(0, abs=1e-6)
    assert float(white.advantages[own].std(correction=0)) == pytest.approx(1, rel=1e-6)
    # an affine map keeps the order
    assert torch.equal(plain.advantages[own].argsort(), white.advantages[own].argsort())
    assert not white.advantages[~own].any()


def test_whitening_spans_all_micro_batches(world: World) -> None:
    together, apart = ppo_micro(), [ppo_micro(), ppo_micro()]
    apart[0].rewards *= 3
    Ppo(PpoSettings(name="ppo")).credit_tokens(batch_of(*apart), world, Meter())
    Ppo(PpoSettings(name="ppo")).credit_tokens(batch_of(together), world, Meter())
    own = together.loss_mask.bool()
    joined = torch.cat([micro.advantages[own] for micro in apart if micro.advantages is not None])
    assert float(joined.mean()) == pytest.approx(0, abs=1e-6)
    assert float(joined[:4].mean()) > 0.1  # the first one earned more


def value_micro() -> tuple[MicroBatch, torch.Tensor]:
    micro = micro_of(
        [[0, 1, 1, 1]], values=torch.tensor([0.0, 1.0, 1.0, 1.0]), returns=torch.tensor([0.0, 3.0, 1.1, -1.0])
    )
    return micro, torch.tensor([50.0, 2.0, 1.3, 1.05])


def test_value_loss_without_clip(world: World) -> None:
    micro, values = value_micro()
    meter = Meter()
    loss = Ppo(PpoSettings(name="ppo")).value_loss(values, micro, meter)
    errors = [1.0, 0.04, 2.05**2]
    assert float(loss) == pytest.approx(0.5 * sum(errors) / 3, rel=1e-6)
    numbers = reported(meter, world)
    assert numbers["critic/vf_clipfrac"] == 0
    # metrics.md §9.4: C02 = ½ C06 without value clipping
    assert numbers["critic/vf_loss"] == pytest.approx(0.5 * numbers["critic/error"], rel=1e-6)
    assert numbers["critic/vpred_mean"] == pytest.approx((2.0 + 1.3 + 1.05) / 3)


def test_value_clip_is_pessimistic(world: World) -> None:
    """A value that moved further than 0.2 is judged as if it had not, whenever that is worse."""
    micro, values = value_micro()
    values.requires_grad_()
    meter = Meter()
    loss = Ppo(PpoSettings(name="ppo", value_clip=0.2)).value_loss(values, micro, meter)
    loss.backward()
    # V = 2 counts as 1.2: (1.2 - 3)^2 > 1. V = 1.3 as 1.2: (0.1)^2 < (0.2)^2, so it stays. V = 1.05 is near enough.
    assert float(loss.detach()) == pytest.approx(0.5 * (1.8**2 + 0.04 + 2.05**2) / 3, rel=1e-6)
    assert reported(meter, world)["critic/vf_clipfrac"] == pytest.approx(1 / 3)
    assert values.grad is not None
    # clipped: no gradient; otherwise (V - R) / n
    assert values.grad.tolist() == pytest.approx([0.0, 0.0, 0.2 / 3, 2.05 / 3], rel=1e-5)


def test_grpo_has_no_critic() -> None:
    with pytest.raises(TypeError, match="no critic"):
        Grpo(GrpoSettings(name="grpo")).value_loss(torch.zeros(1), micro_of([[1]]), Meter())


# -- packing


def synthetic(micro: MicroBatch, salt: int) -> torch.Tensor:
    """A number for every token that depends on the sample and the position alone, as a model's output would."""
    seed = micro.sample_index[micro.sequence_of_token] * 1009 + micro.positions * 31 + salt * 7
    return torch.sin(seed.double()).float() * micro.loss_mask


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-sum", "sequence-mean-token-mean"])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_packing_changes_no_number(name: str, aggregation: Any, world: World) -> None:
    """metrics.md §9.7 and §9.8: any token budget, and a sample without own tokens, give the same losses and metrics."""
    kl = {"coef": 0.1, "estimator": "k3", "apply_to": "reward" if name == "ppo" else "loss"}

    def losses(budget: int, with_masked_sample: bool) -> dict[str, float]:
        groups = [group_of([1.0, 0.0, 0.5], [3, 17, 1], "a"), group_of([0.2, 0.9, 0.4], [8, 2, 40], "b")]
        if with_masked_sample:
            silent = group_of([0.3], [5], "c")
            silent.samples[0].loss_mask[:] = 0
            groups.append(silent)
        settings = PpoSettings(name="ppo", kl=kl, value_clip=0.2) if name == "ppo" else GrpoSettings(name="grpo", kl=kl)
        algorithm = build_algorithm(settings)
        algorithm.credit_groups(groups, Meter())
        (batch,) = pack(groups, PackPlan(1, 1, budget, aggregation))
        for micro in batch.microbatches():
            micro.old_logprobs, micro.ref_logprobs = synthetic(micro, 1), synthetic(micro, 2)
            micro.values, micro.entropy = synthetic(micro, 3), synthetic(micro, 4)
        meter = Meter()
        algorithm.credit_tokens(batch, world, meter)
        for micro in batch.microbatches():
            algorithm.policy_loss(synthetic(micro, 5), synthetic(micro, 6), micro, meter)
            if name == "ppo":
                algorithm.value_loss(synthetic(micro, 7), micro, meter)
        numbers = reported(meter, world)
        assert all(math.isfinite(number) for number in numbers.values())
        return numbers

    expected = losses(10_000, False)
    assert len(expected) > 20
    for budget in (1, 25):
        assert losses(budget, False) == pytest.approx(expected, rel=1e-5, abs=1e-6)  # float32 sums in another order
    silent = losses(25, True)
    for key, value in expected.items():
        if not key.startswith(("critic/rewards/", "actor/total_samples")):  # those are counted per sample
            assert silent[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key


# -- the choice


class Custom(Sft):
    def __init__(self, coefficient: float = 1.0) -> None:
        self.coefficient = coefficient


class NoAlgorithm:
    num_epochs = 1

    def policy_loss(self) -> None: ...


def test_build_algorithm() -> None:
    assert isinstance(build_algorithm(GrpoSettings(name="grpo", num_epochs=3)), Grpo)
    assert build_algorithm(GrpoSettings(name="grpo", num_epochs=3)).num_epochs == 3
    assert isinstance(build_algorithm(PpoSettings(name="ppo")), Ppo)
    assert isinstance(build_algorithm(SftSettings(name="sft")), Sft)
    custom = build_algorithm(CustomAlgorithm(name=f"{__name__}:Custom", options={"coefficient": 0.5}))
    assert isinstance(custom, Custom)
    assert custom.coefficient == 0.5


@pytest.mark.parametrize(
    ("path", "options", "code", "told"),
    [
        ("Custom", {"coeficient": 1}, "MRL-1304", "coeficient"),
        ("NoAlgorithm", {}, "MRL-1305", "credit_groups, credit_tokens"),
        ("Missing", {}, "MRL-1303", "NoAlgorithm"),
    ],
)
def test_a_custom_class_that_does_not_fit(path: str, options: dict[str, Any], code: str, told: str) -> None:
    with pytest.raises(ConfigError, match=code) as caught:
        build_algorithm(CustomAlgorithm(name=f"{__name__}:{path}", options=options))
    assert told in str(caught.value)
