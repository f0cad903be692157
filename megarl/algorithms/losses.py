"""The clipped policy loss that GRPO and PPO share, and its statistics.

All losses have one form: sum over tokens of ``micro.loss_weight`` times a token's loss. The weights hold the
aggregation (token mean, sequence mean …) and its *global* denominator, so partial losses of micro-batches and ranks
simply add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megarl.algorithms.correction import correction_weights
from megarl.config.algorithms import CorrectionSettings, PolicyLossSettings, SftTermSettings
from megarl.core.batch import MicroBatch
from megarl.core.protocols import Statistics
from megarl.ops.kl import Estimator, kl_estimate
from megarl.ops.masked import sequence_means, total


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Settings of the clipped surrogate (Schulman et al., 2017).

    ``clip_low`` and ``clip_high`` may differ (DAPO's clip-higher). ``dual_clip`` bounds the loss of tokens with a
    negative advantage and an exploding ratio at ``dual_clip * |advantage|`` (Ye et al., 2020).
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None
    entropy_coef: float
    kl_coef: float
    kl_estimator: Estimator
    sft: SftTermSettings = field(default_factory=SftTermSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)

    @classmethod
    def of(cls, settings: PolicyLossSettings) -> PolicyLoss:
        """The loss that a configuration asks for. A KL that the reward pays is not in the loss."""
        return cls(
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            dual_clip=settings.dual_clip,
            entropy_coef=settings.entropy_coef,
            kl_coef=settings.kl.coef if settings.kl.apply_to == "loss" else 0.0,
            kl_estimator=settings.kl.estimator,
            sft=settings.sft,
            correction=settings.correction,
        )

    def __call__(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """This micro-batch's part of the loss. ``kl_coef`` is 0 when the KL is taken from the reward instead."""
        assert micro.old_logprobs is not None and micro.advantages is not None
        # Outside the mask a log-prob may be anything: the first token of a sequence is nobody's prediction, and a
        # prompt may be so unlikely that k3 overflows. Infinity times weight 0 would be NaN, so all columns are 0 there.
        logprobs = torch.where(micro.loss_mask.bool(), logprobs, 0.0)
        # A ratio past e^20 is beyond every clip; its exponential must not overflow before the clip sees it.
        log_ratio = (logprobs - micro.old_logprobs).clamp(-20.0, 20.0)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        plain, bounded = -micro.advantages * ratio, -micro.advantages * clipped
        token_loss = torch.maximum(plain, bounded)
        lower = torch.zeros_like(token_loss, dtype=torch.bool)
        if self.dual_clip is not None:
            bound = -micro.advantages * self.dual_clip
            lower = (micro.advantages < 0) & (token_loss > bound)
            token_loss = torch.where(lower, bound, token_loss)
        if self.correction.kind != "none":
            token_loss = token_loss * correction_weights(micro, self.correction)[0]
        weighted = token_loss * micro.loss_weight
        loss = (weighted * micro.sample_weight[micro.sequence_of_token]).sum()
        meter.loss("actor/pg_loss", weighted.detach().sum())
        meter.loss("actor/weighted_pg_loss", loss.detach())
        loss = loss + self._other_terms(logprobs, entropy, micro, meter)
        meter.loss("actor/total_loss", loss.detach())
        with torch.no_grad():
            _report_ratio(log_ratio, bounded > plain, micro, self, meter)
            meter.mean("actor/entropy_update", total(entropy * micro.loss_mask), total(micro.loss_mask))
            if self.dual_clip is not None:
                meter.mean("actor/pg_clipfrac_lower", total(lower * micro.loss_mask), total(micro.loss_mask))
        return loss

    def _other_terms(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """KL, supervised term and entropy bonus, each with its coefficient."""
        loss = torch.zeros((), device=logprobs.device)
        if micro.ref_logprobs is not None:
            kl_loss = (kl_estimate(logprobs, micro.ref_logprobs, self.kl_estimator) * micro.loss_weight).sum()
            loss = loss + self.kl_coef * kl_loss
            meter.loss("actor/kl_loss", kl_loss.detach())
            if self.kl_coef:
                meter.last("actor/kl_coef", self.kl_coef)
        if self.sft.coef:
            loss = loss + self.sft.coef * self._sft_loss(logprobs, micro, meter)
        if self.entropy_coef:
            loss = loss - self.entropy_coef * (entropy * micro.loss_weight).sum()
        return loss

    def _sft_loss(self, logprobs: torch.Tensor, micro: MicroBatch, meter: Statistics) -> torch.Tensor:
        """-log p of the samples' own tokens: the mean over those of good samples, and over those of the others."""
        sequence = micro.sequence_of_token
        is_good = (micro.scores > 0)[sequence]
        nll = -logprobs * micro.loss_mask
        kind_weight = torch.where(is_good, self.sft.positive_weight, self.sft.negative_weight)
        loss = (nll * micro.sft_weight[sequence] * kind_weight).sum()
        meter.loss("actor/sft_loss", loss.detach())
        for name, chosen in (("positive", is_good), ("negative", ~is_good)):
            meter.mean(f"actor/{name}_sft_loss", total(nll.detach() * chosen), total(micro.loss_mask * chosen))
        return loss


def report_samples(micro: MicroBatch, meter: Statistics) -> None:
    """How many samples an optimizer step sees, and how many of them it can learn from."""
    real = micro.sample_index >= 0
    tokens = torch.zeros_like(micro.scores).index_add_(0, micro.sequence_of_token, micro.loss_mask)
    meter.loss("actor/valid_samples", float((real & (tokens > 0)).sum()))
    meter.loss("actor/total_samples", float(real.sum()))


def _report_ratio(
    log_ratio: torch.Tensor, active: torch.Tensor, micro: MicroBatch, settings: PolicyLoss, meter: Statistics
) -> None:
    """How far the policy moved from the one that generated the samples: token means over the policy's own tokens."""
    mask = micro.loss_mask
    ratio = log_ratio.exp()
    high, low = ratio > 1 + settings.clip_high, ratio < 1 - settings.clip_low
    columns = torch.stack([-log_ratio, 0.5 * log_ratio.square(), active, high, low, high | low]) * mask
    num_tokens = float(mask.sum())
    names = ("ppo_kl", "approxkl", "pg_clipfrac", *(f"ppo_ratio_{side}clipfrac" for side in ("high_", "low_", "")))
    for name, column_total in zip(names, columns.double().sum(1).tolist(), strict=True):
        meter.mean(f"actor/{name}", column_total, num_tokens)
    if num_tokens:
        chosen = ratio[mask.bool()]
        meter.max("actor/ratio_max", chosen.max())
        meter.min("actor/ratio_min", chosen.min())
    meter.mean("actor/ratio_mean", *sequence_means(ratio, micro))
    report_samples(micro, meter)


def report_tokens(micro: MicroBatch, meter: Statistics) -> None:
    """Statistics of the batch before any update, over the policy's own tokens."""
    for name, column in {
        "critic/advantages": micro.advantages,
        "critic/returns": micro.returns,
        "critic/values": micro.values,
    }.items():
        if column is not None:
            report_column(name, column, micro, meter)
    for name, column in {
        "actor/entropy": micro.entropy,
        "critic/old_log_prob/mean": micro.old_logprobs,
        "critic/ref_log_prob/mean": micro.ref_logprobs,
    }.items():
        if column is not None:
            meter.mean(name, total(column * micro.loss_mask), total(micro.loss_mask))


def report_column(name: str, column: torch.Tensor, micro: MicroBatch, meter: Statistics) -> None:
    """The mean, the largest and the smallest of the policy's own tokens."""
    chosen = column[micro.loss_mask.bool()]
    meter.mean(f"{name}/mean", total(chosen), chosen.numel())
    if chosen.numel():
        meter.max(f"{name}/max", chosen.max())
        meter.min(f"{name}/min", chosen.min())
