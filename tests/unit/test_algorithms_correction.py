"""Importance sampling against the engine: golden numbers, bounds, exactness where nothing is to be corrected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from megarl.algorithms.correction import correction_weights, report_correction
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.losses import PolicyLoss
from megarl.algorithms.ppo import Ppo
from megarl.config.algorithms import CorrectionSettings, GrpoSettings, PpoSettings
from megarl.core.batch import MicroBatch, MiniBatch, TrainBatch
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.metrics.registry import check_meter
from tests.unit.one_rank import micro_of, one_rank_world, reported

PLAIN = PolicyLoss(clip_low=0.2, clip_high=0.2, dual_clip=None, entropy_coef=0.0, kl_coef=0.0, kl_estimator="k3")
KINDS = [CorrectionSettings(kind=kind, level=level) for kind in ("truncate", "mask") for level in ("token", "sequence")]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def drawn(*ratios: list[float]) -> MicroBatch:
    """Sequences of a prompt token and tokens with these ratios of trainer to engine; advantages are 1, 2, 3 …"""
    old = [torch.cat([torch.tensor([-9.0]), -torch.linspace(0.5, 2.0, len(one))]) for one in ratios]
    gaps = [torch.cat([torch.tensor([5.0]), torch.tensor(one).log()]) for one in ratios]
    masks = [[0.0] + [1.0] * len(one) for one in ratios]
    micro = micro_of(masks, old_logprobs=torch.cat(old), rollout_logprobs=torch.cat(old) - torch.cat(gaps))
    micro.advantages = micro.loss_mask.cumsum(0) * micro.loss_mask
    return micro


GOLDEN = [
    # ratios 0.4 1 3 | 1.5 0.8, whose products are 1.2 | 1.2
    ("truncate", "token", [0.4, 1.0, 2.0, 1.5, 0.8], 0.2),
    ("mask", "token", [0.0, 1.0, 0.0, 1.5, 0.8], 0.4),
    ("truncate", "sequence", [1.2, 1.2, 1.2, 1.2, 1.2], 0.0),
    ("mask", "sequence", [1.2, 1.2, 1.2, 1.2, 1.2], 0.0),
]


@pytest.mark.parametrize(("kind", "level", "weights", "share"), GOLDEN)
def test_golden_weights_and_loss(kind: str, level: str, weights: list[float], share: float, world: World) -> None:
    settings = CorrectionSettings(kind=kind, level=level)  # type: ignore[arg-type]
    micro = drawn([0.4, 1.0, 3.0], [1.5, 0.8])
    own = micro.loss_mask.bool()
    found, _ = correction_weights(micro, settings)
    assert found[own].tolist() == pytest.approx(weights, rel=1e-6)
    meter = Meter()
    report_correction(micro, settings, meter)
    check_meter(meter)
    numbers = reported(meter, world)
    assert numbers["mismatch/correction_mean"] == pytest.approx(sum(weights) / 5, rel=1e-6)
    assert numbers["mismatch/corrected_frac"] == pytest.approx(share)
    assert micro.old_logprobs is not None
    logprobs = micro.old_logprobs.clone().requires_grad_()
    loss = replace(PLAIN, correction=settings)(logprobs, torch.zeros(7), micro, Meter())
    loss.backward()
    # on the first update the policy's own ratio is 1; the denominator is 5 tokens, masked ones included
    expected = [-advantage * weight / 5 for advantage, weight in zip((1, 2, 3, 4, 5), weights, strict=True)]
    assert float(loss.detach()) == pytest.approx(sum(expected), rel=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad[own].tolist() == pytest.approx(expected, rel=1e-6)


def test_sequences_far_off_are_cut_as_a_whole() -> None:
    micro = drawn([1.5, 1.5, 1.0], [0.5, 0.9], [1.0, 1.0])
    own = micro.loss_mask.bool()
    masked, cut = correction_weights(micro, CorrectionSettings(kind="mask", level="sequence"))
    assert masked[own].tolist() == pytest.approx([0, 0, 0, 0, 0, 1, 1])
    assert cut[own].tolist() == [True] * 5 + [False] * 2
    truncated, _ = correction_weights(micro, CorrectionSettings(kind="truncate", level="sequence"))
    assert truncated[own].tolist() == pytest.approx([2, 2, 2, 0.45, 0.45, 1, 1])
    wide, _ = correction_weights(micro, CorrectionSettings(kind="mask", level="sequence", low=0.4, high=3.0))
    assert wide[own].tolist() == pytest.approx([2.25, 2.25, 2.25, 0.45, 0.45, 1, 1])


@pytest.mark.parametrize("settings", KINDS, ids=lambda one: f"{one.kind}-{one.level}")
def test_agreement_changes_no_bit(settings: CorrectionSettings) -> None:
    micro = drawn([1.0] * 5, [1.0] * 3)
    assert micro.old_logprobs is not None
    micro.rollout_logprobs = micro.old_logprobs.clone()
    moved = micro.old_logprobs + torch.linspace(-0.5, 0.5, micro.num_tokens)
    found = []
    for loss in (PLAIN, replace(PLAIN, correction=settings)):
        logprobs = moved.clone().requires_grad_()
        value = loss(logprobs, torch.zeros_like(moved), micro, Meter())
        value.backward()
        found.append((value.detach(), logprobs.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", KINDS, ids=lambda one: f"{one.kind}-{one.level}")
def test_a_sequence_weighs_the_same_in_any_company(settings: CorrectionSettings) -> None:
    generator = torch.Generator().manual_seed(3)
    ratios = [(0.2 * torch.randn(size, generator=generator)).exp().tolist() for size in (7, 1, 30, 12)]
    together, _ = correction_weights(drawn(*ratios), settings)
    apart = [correction_weights(drawn(one), settings)[0] for one in ratios]
    assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize("settings", KINDS, ids=lambda one: f"{one.kind}-{one.level}")
def test_impossible_tokens_do_not_overflow(settings: CorrectionSettings) -> None:
    micro = drawn([1.0, 1.0])
    micro.rollout_logprobs = torch.tensor([0.0, -1e30, -2.0])
    weights, _ = correction_weights(micro, settings)
    assert torch.isfinite(weights).all()
    assert float(weights[1]) == (2.0 if settings.kind == "truncate" else 0.0)


def test_both_algorithms_report_it(world: World) -> None:
    correction = {"kind": "truncate"}
    for algorithm in (
        Grpo(GrpoSettings(name="grpo", correction=correction)),
        Ppo(PpoSettings(name="ppo", correction=correction)),
    ):
        micro = drawn([4.0, 1.0])
        micro.values = torch.zeros(3)
        meter = Meter()
        algorithm.credit_tokens(TrainBatch([MiniBatch([micro], 2, 1)]), world, meter)
        numbers = reported(meter, world)
        assert numbers["mismatch/correction_mean"] == pytest.approx(1.5)
        assert numbers["mismatch/corrected_frac"] == 0.5
        assert numbers["mismatch/logprob_gap_max"] == pytest.approx(math.log(4), rel=1e-6)
