"""PPO: proximal policy optimization with a critic (Schulman et al., 2017; for language models Ouyang et al., 2022).

The reward of a response arrives with its last token; on the way, each token may pay a KL penalty. A critic foresees
what is still to come, generalised advantage estimation turns rewards and values into advantages, and advantages are
whitened over all tokens of the step, on all ranks. The critic learns by a squared error, optionally clipped around
its old values:

    L_V = 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.correction import report_correction
from megarl.algorithms.losses import PolicyLoss, report_column, report_tokens
from megarl.algorithms.mismatch import report_mismatch
from megarl.algorithms.reward_scale import RewardScale
from megarl.algorithms.rewards import report_groups, report_rewards, token_penalty, weigh_samples
from megarl.config.algorithms import PpoSettings
from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Statistics
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.ops.masked import sequence_means, total, whiten
from megarl.ops.returns import gae


class Ppo:
    """GAE with a critic, clipped surrogate."""

    def __init__(self, settings: PpoSettings) -> None:
        self._settings = settings
        self._penalty = token_penalty(settings.kl)
        self._loss = PolicyLoss.of(settings)
        self._scale = RewardScale(settings)

    @property
    def num_epochs(self) -> int:
        """Passes over a step's samples."""
        return self._settings.num_epochs

    def credit_groups(self, groups: Sequence[Group], meter: Statistics) -> None:
        """PPO compares with the critic's opinion, not within groups."""
        self._scale.shape(groups, meter)
        weigh_samples(groups, self._settings, meter)
        report_groups(groups, meter)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """See `Remembers`: the rewards seen so far, where these are normalised by all of them."""
        return self._scale.state()

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """See `Remembers`."""
        self._scale.restore(state)

    def credit_tokens(self, batch: TrainBatch, world: World, meter: Statistics) -> TrainBatch:
        """Token rewards, then advantages and returns by GAE, then whitening over the whole step."""
        microbatches = list(batch.microbatches())
        for micro in microbatches:
            assert micro.values is not None
            micro.advantages, micro.returns = gae(
                self._token_rewards(micro),
                micro.values,
                micro.loss_mask,
                micro.sequence_of_token,
                self._settings.gamma,
                self._settings.gae_lambda,
            )
        if world.reports_losses:
            for micro in microbatches:
                _report_raw_advantages(micro, meter)
        if self._settings.whiten_advantages:
            raw = [micro.advantages for micro in microbatches if micro.advantages is not None]
            for micro, advantages in zip(
                microbatches, whiten(raw, [micro.loss_mask for micro in microbatches], world), strict=True
            ):
                micro.advantages = advantages
        if world.reports_losses:
            for micro in microbatches:
                report_rewards(micro, self._penalty(micro), meter)
                report_tokens(micro, meter)
                report_mismatch(micro, batch.engines, meter)
                report_correction(micro, self._settings.correction, meter)
                _report_foresight(micro, meter)
        return batch

    def _token_rewards(self, micro: MicroBatch) -> torch.Tensor:
        """The score at the last token that the policy wrote, less each token's KL penalty."""
        rewards = -self._penalty(micro)
        position = torch.arange(micro.num_tokens, device=rewards.device)
        own = torch.where(micro.loss_mask.bool(), position, -1)
        last = torch.full((micro.num_sequences,), -1, dtype=torch.int64, device=rewards.device)
        last.scatter_reduce_(0, micro.sequence_of_token, own, "amax")
        scored = last >= 0
        rewards[last[scored]] += micro.rewards[scored]
        return rewards

    def policy_loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """The clipped surrogate."""
        return self._loss(logprobs, entropy, micro, meter)

    def value_loss(self, values: torch.Tensor, micro: MicroBatch, meter: Statistics) -> torch.Tensor:
        """Squared error of the critic against the returns."""
        assert micro.values is not None and micro.returns is not None
        mask = micro.loss_mask
        error = (values - micro.returns).square()
        worst, was_clipped = error, torch.zeros_like(mask)
        if self._settings.value_clip is not None:
            near = micro.values + (values - micro.values).clamp(-self._settings.value_clip, self._settings.value_clip)
            bounded = (near - micro.returns).square()
            worst = torch.maximum(error, bounded)
            was_clipped = (bounded > error).float()
        loss = 0.5 * (worst * micro.loss_weight).sum()
        with torch.no_grad():
            num_tokens = mask.sum()
            meter.loss("critic/vf_loss", loss)
            meter.mean("critic/vf_clipfrac", total(was_clipped * mask), num_tokens)
            meter.mean("critic/vpred_mean", total(values * mask), num_tokens)
            meter.mean("critic/error", total(error * mask), num_tokens)
            meter.mean("critic/value", *sequence_means(micro.values, micro))
        return loss


def _report_raw_advantages(micro: MicroBatch, meter: Statistics) -> None:
    """What the critic's opinion leaves over, before whitening hides its size."""
    assert micro.advantages is not None
    report_column("critic/raw_advantages", micro.advantages, micro, meter)
    _report_variance("critic/raw_advantages/var", micro.advantages, micro, meter)


def _report_foresight(micro: MicroBatch, meter: Statistics) -> None:
    """Variances that tell how much of the returns the critic foresaw (`critic/vf_explained_var`)."""
    assert micro.values is not None and micro.returns is not None
    _report_variance("critic/returns/var", micro.returns, micro, meter)
    _report_variance("critic/value_errors/var", micro.returns - micro.values, micro, meter)


def _report_variance(name: str, column: torch.Tensor, micro: MicroBatch, meter: Statistics) -> None:
    picked = column[micro.loss_mask.bool()].double()
    if picked.numel():
        mean = picked.mean()
        meter.moments(name, picked.numel(), mean, (picked - mean).square().sum())
