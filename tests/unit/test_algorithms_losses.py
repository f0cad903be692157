"""The clipped surrogate: golden vectors, signs, gradients against closed formulas, sums independent of packing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from megarl.algorithms.losses import PolicyLoss
from megarl.algorithms.sft import Sft
from megarl.core.batch import MicroBatch
from megarl.core.world import World
from megarl.metrics.meter import Meter
from tests.unit.one_rank import micro_of, one_rank_world, reported

PLAIN = PolicyLoss(clip_low=0.2, clip_high=0.2, dual_clip=None, entropy_coef=0.0, kl_coef=0.0, kl_estimator="k3")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def golden_micro(ratios: list[float], advantages: list[float]) -> tuple[MicroBatch, torch.Tensor]:
    """One sequence: a prompt token, then tokens with these ratios. Also the new log-probs."""
    old = -torch.linspace(0.5, 2.0, len(ratios))
    micro = micro_of(
        [[0.0] + [1.0] * len(ratios)],
        old_logprobs=torch.cat([torch.zeros(1), old]),
        advantages=torch.tensor([0.0, *advantages]),
    )
    # the prompt's log-prob is arbitrary: it must not matter
    return micro, torch.cat([torch.tensor([-4.0]), old + torch.tensor(ratios).log()])


def run(loss: PolicyLoss, micro: MicroBatch, logprobs: torch.Tensor, world: World) -> tuple[float, dict[str, float]]:
    meter = Meter()
    value = loss(logprobs, torch.zeros_like(logprobs), micro, meter)
    return float(value), reported(meter, world)


def test_golden_clip_fractions(world: World) -> None:
    """metrics.md §9.6: of four tokens only r = 1.3 with A > 0 is held back by the clip."""
    micro, logprobs = golden_micro([0.7, 1.0, 1.3, 1.5], [1.0, 1.0, 1.0, -1.0])
    value, numbers = run(PLAIN, micro, logprobs, world)
    assert numbers["actor/ppo_ratio_low_clipfrac"] == 0.25
    assert numbers["actor/ppo_ratio_high_clipfrac"] == 0.5
    assert numbers["actor/ppo_ratio_clipfrac"] == 0.75
    assert numbers["actor/pg_clipfrac"] == 0.25
    assert value == pytest.approx((-0.7 - 1.0 - 1.2 + 1.5) / 4, rel=1e-6)  # float32
    assert numbers["actor/pg_loss"] == numbers["actor/total_loss"] == pytest.approx(value)
    assert numbers["actor/ratio_max"] == pytest.approx(1.5)
    assert numbers["actor/ratio_min"] == pytest.approx(0.7)
    assert numbers["actor/ratio_mean"] == pytest.approx(4.5 / 4)
    assert "actor/pg_clipfrac_lower" not in numbers


def test_golden_dual_clip(world: World) -> None:
    """metrics.md §9.6: c = 3 bounds r = 3.5 with A = -1, and leaves r = 2 and every A > 0 alone."""
    dual = replace(PLAIN, dual_clip=3.0)
    micro, logprobs = golden_micro([3.5, 2.0, 3.5], [-1.0, -1.0, 1.0])
    value, numbers = run(dual, micro, logprobs, world)
    assert numbers["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
    assert value == pytest.approx((3.0 + 2.0 - 1.2) / 3, rel=1e-6)
    logprobs.requires_grad_()
    dual(logprobs, torch.zeros(4), micro, Meter()).backward()
    assert logprobs.grad is not None
    # bounded: no gradient; unbounded: -A r / n; clipped above: no gradient
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 2 / 3, 0.0], rel=1e-6)


def test_golden_kl_sign(world: World) -> None:
    """metrics.md §9.5: the policy forgot its own tokens by 0.1 nats, so KL(old || new) is +0.1."""
    micro, logprobs = golden_micro([math.exp(-0.1)] * 3, [1.0, -1.0, 0.5])
    _, numbers = run(PLAIN, micro, logprobs, world)
    assert numbers["actor/ppo_kl"] == pytest.approx(0.1, rel=1e-5)
    assert numbers["actor/approxkl"] == pytest.approx(0.005, rel=1e-5)


def test_asymmetric_clip(world: World) -> None:
    wide = replace(PLAIN, clip_low=0.1, clip_high=0.4)
    micro, logprobs = golden_micro([1.3, 1.5, 0.85, 0.85], [1.0, 1.0, 1.0, -1.0])
    value, numbers = run(wide, micro, logprobs, world)
    assert value == pytest.approx((-1.3 - 1.4 - 0.85 + 0.9) / 4, rel=1e-6)
    assert numbers["actor/ppo_ratio_high_clipfrac"] == 0.25
    assert numbers["actor/ppo_ratio_low_clipfrac"] == 0.5
    assert numbers["actor/pg_clipfrac"] == 0.5


def test_ratio_mean_is_a_mean_over_sequences(world: World) -> None:
    ratios = torch.tensor([1.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    micro = micro_of([[0, 1], [0, 1, 1, 1], [0]], old_logprobs=torch.zeros(7), advantages=torch.zeros(7))
    logprobs = torch.cat([ratios.log(), torch.zeros(1)])
    _, numbers = run(PLAIN, micro, logprobs, world)
    assert numbers["actor/ratio_mean"] == pytest.approx((2 + 1) / 2)  # the sequence without tokens does not count


def random_micro(seed: int) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(mask.numel(), generator=generator)

    masks = [[0, 0, 1, 1, 1], [0, 1, 0, 0, 1, 1], [0, 1], [0, 0, 0]]
    mask = torch.tensor([float(flag) for one in masks for flag in one])
    old = (-2 + normal()) * mask
    micro = micro_of(
        masks, old_logprobs=old, ref_logprobs=(old + normal(0.3)) * mask, advantages=normal() * mask,
        loss_weight=torch.rand(mask.numel(), generator=generator) * mask,
    )  # fmt: skip
    return micro, -2 + normal() * (1 - mask) + (old + 2 + normal(0.4)) * mask, normal().abs()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradients_equal_the_closed_formula(seed: int, estimator: str, world: World) -> None:
    micro, logprobs, entropy = random_micro(seed)
    loss = PolicyLoss(0.2, 0.3, 2.0, entropy_coef=0.1, kl_coef=0.5, kl_estimator=estimator)  # type: ignore[arg-type]
    logprobs.requires_grad_()
    entropy.requires_grad_()
    loss(logprobs, entropy, micro, Meter()).backward()
    assert logprobs.grad is not None and entropy.grad is not None
    assert micro.old_logprobs is not None and micro.ref_logprobs is not None and micro.advantages is not None
    advantage, weight = micro.advantages.double().numpy(), micro.loss_weight.double().numpy()
    new = logprobs.detach().double().numpy()
    ratio = np.exp(new - micro.old_logprobs.double().numpy())
    rising = (advantage > 0) & (ratio < 1.3)
    falling = (advantage < 0) & (ratio > 0.8) & (ratio < 2.0)
    gap = new - micro.ref_logprobs.double().numpy()
    slope = {"k1": np.ones_like(gap), "k2": gap, "k3": 1 - np.exp(-gap)}[estimator]
    expected = weight * (np.where(rising | falling, -advantage * ratio, 0.0) + 0.5 * slope)
    np.testing.assert_allclose(logprobs.grad.numpy(), expected, atol=1e-6)  # float32, gradients up to 2
    np.testing.assert_allclose(entropy.grad.numpy(), -0.1 * weight, atol=1e-7)
    assert not logprobs.grad[micro.loss_mask == 0].any()


def test_terms_add_up_with_their_signs(world: World) -> None:
    micro, logprobs, entropy = random_micro(3)
    meter = Meter()
    loss = replace(PLAIN, kl_coef=0.7, entropy_coef=0.2)
    total = float(loss(logprobs, entropy, micro, meter))
    numbers = reported(meter, world)
    bonus = float((entropy * micro.loss_weight).sum())
    assert bonus > 0
    assert numbers["actor/kl_loss"] > 0
    expected = numbers["actor/pg_loss"] + 0.7 * numbers["actor/kl_loss"] - 0.2 * bonus
    assert numbers["actor/total_loss"] == pytest.approx(total) == pytest.approx(expected, rel=1e-6)
    assert numbers["actor/kl_coef"] == pytest.approx(0.7)


def test_a_kl_without_coefficient_is_reported_but_not_learned(world: World) -> None:
    """With the KL in the reward, the loss must not hold it a second time."""
    micro, logprobs, _ = random_micro(4)
    total, numbers = run(PLAIN, micro, logprobs, world)
    assert numbers["actor/kl_loss"] > 0
    assert total == pytest.approx(numbers["actor/pg_loss"])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_unlikely_prompts_do_not_spoil_the_loss(estimator: str, kl_coef: float, world: World) -> None:
    """A prompt token of log-prob -200 (common at low temperature) has weight 0; exp(200) * 0 would be NaN."""
    micro, logprobs, entropy = random_micro(5)
    loss = replace(PLAIN, kl_coef=kl_coef, kl_estimator=estimator)
    expected = float(loss(logprobs, entropy, micro, Meter()))
    unlikely = torch.where(micro.loss_mask.bool(), logprobs, -200.0).requires_grad_()
    value = loss(unlikely, entropy, micro, Meter())
    value.backward()
    assert float(value.detach()) == expected
    assert unlikely.grad is not None
    assert torch.isfinite(unlikely.grad).all()


def test_an_all_masked_batch_has_zero_loss_and_no_fractions(world: World) -> None:
    micro = micro_of([[0, 0], [0, 0, 0]], old_logprobs=torch.zeros(5), advantages=torch.zeros(5))
    logprobs = torch.full((5,), -3.0, requires_grad=True)
    meter = Meter()
    loss = replace(PLAIN, dual_clip=3.0, entropy_coef=0.1)(logprobs, torch.ones(5), micro, meter)
    loss.backward()
    assert float(loss.detach()) == 0
    assert logprobs.grad is not None
    assert not logprobs.grad.any()
    numbers = reported(meter, world)
    assert numbers.pop("actor/total_samples") == 2
    assert numbers.keys() == {
        "actor/pg_loss", "actor/weighted_pg_loss", "actor/total_loss", "actor/valid_samples",
    }  # fmt: skip
    assert all(value == 0 for value in numbers.values())


def split(
    micro: MicroBatch, logprobs: torch.Tensor, entropy: torch.Tensor
) -> Iterator[tuple[MicroBatch, torch.Tensor, torch.Tensor]]:
    """One micro-batch per sequence."""
    edges = micro.cu_seqlens.tolist()
    for row, (start, end) in enumerate(pairwise(edges)):
        piece = replace(micro, cu_seqlens=torch.tensor([0, end - start], dtype=torch.int32))
        for name in ("token_ids", "positions", "loss_mask", "rollout_logprobs", "loss_weight", "old_logprobs"):
            setattr(piece, name, getattr(micro, name)[start:end])
        assert micro.ref_logprobs is not None and micro.advantages is not None
        piece.ref_logprobs, piece.advantages = micro.ref_logprobs[start:end], micro.advantages[start:end]
        piece.sample_index = micro.sample_index[row : row + 1]
        yield piece, logprobs[start:end], entropy[start:end]


def test_partial_losses_of_micro_batches_add_up(world: World) -> None:
    """metrics.md §9.8: packed together or one by one, every number is the same."""
    loss = PolicyLoss(0.2, 0.2, 2.0, entropy_coef=0.1, kl_coef=0.5, kl_estimator="k3")
    micro, logprobs, entropy = random_micro(6)
    together, apart = Meter(), Meter()
    whole = float(loss(logprobs, entropy, micro, together))
    pieces = sum(float(loss(*piece[1:], piece[0], apart)) for piece in split(micro, logprobs, entropy))
    assert pieces == pytest.approx(whole, rel=1e-6)
    assert reported(apart, world) == pytest.approx(reported(together, world), rel=1e-6, abs=1e-7)


def test_sft_is_the_weighted_negative_log_likelihood(world: World) -> None:
    micro, logprobs, entropy = random_micro(7)
    meter = Meter()
    logprobs.requires_grad_()
    loss = Sft().policy_loss(logprobs, entropy, micro, meter)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-float((logprobs.detach() * micro.loss_weight).sum()))
    assert torch.equal(logprobs.grad, -micro.loss_weight)  # type: ignore[arg-type]
    numbers = reported(meter, world)
    assert numbers["actor/sft_loss"] == numbers["actor/total_loss"] == pytest.approx(float(loss.detach()))
    own = micro.loss_mask.bool()
    assert numbers["actor/entropy"] == pytest.approx(float(entropy[own].mean()))
    with pytest.raises(TypeError, match="no critic"):
        Sft().value_loss(logprobs, micro, meter)
