"""GRPO: group relative policy optimization (Shao et al., "DeepSeekMath", 2024).

A sample's advantage is its reward compared with the other samples of the same prompt:

    A_i = (r_i - mean(r)) / (std(r) + 1e-6)

with the sample standard deviation, as in the paper's code; every token of the sample gets the same advantage. There
is no critic. Departures from the paper: the KL to the reference model may be left out (coefficient 0) and the loss is
averaged as ``loss_aggregation`` says, by default over all tokens of the mini-batch rather than per sequence. Dividing
by the standard deviation can be turned off ("Dr. GRPO", Liu et al., 2025). A KL that the reward pays (``kl.apply_to:
reward``) is taken from each token's advantage, in units of the normalised advantage: log-probs are known only after
groups were compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.algorithms.correction import report_correction
from megarl.algorithms.losses import PolicyLoss, report_tokens
from megarl.algorithms.mismatch import report_mismatch
from megarl.algorithms.reward_scale import RewardScale, shaped_rewards
from megarl.algorithms.rewards import (
    report_groups,
    report_rewards,
    token_penalty,
    weigh_samples,
)
from megarl.config.algorithms import GrpoSettings
from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Statistics
from megarl.core.sample import Group
from megarl.core.world import World


class Grpo:
    """Group-relative advantages, clipped surrogate, no critic."""

    def __init__(self, settings: GrpoSettings) -> None:
        self._settings = settings
        self._penalty = token_penalty(settings.kl)
        self._loss = PolicyLoss.of(settings)
        self._scale = RewardScale(settings)

    @property
    def num_epochs(self) -> int:
        """Passes over a step's samples."""
        return self._settings.num_epochs

    def credit_groups(self, groups: Sequence[Group], meter: Statistics) -> None:
        """A sample is as good as it is better than its siblings. A group without differences teaches nothing."""
        self._scale.shape(groups, meter)
        weigh_samples(groups, self._settings, meter)
        for group in groups:
            rewards = shaped_rewards(group)
            centred = rewards - rewards.mean()
            if self._settings.normalize_by_std:
                spread = rewards.std(ddof=1) if len(rewards) > 1 else 0.0
                centred = centred / (spread + 1e-6)
            for sample, advantage in zip(group.samples, centred, strict=True):
                sample.advantage = float(advantage)
        report_groups(groups, meter)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """See `Remembers`: the rewards seen so far, where these are normalised by all of them."""
        return self._scale.state()

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """See `Remembers`."""
        self._scale.restore(state)

    def credit_tokens(self, batch: TrainBatch, world: World, meter: Statistics) -> TrainBatch:
        """Every token of a sample gets the sample's advantage, less its own KL penalty if the reward carries it."""
        for micro in batch.microbatches():
            penalty = self._penalty(micro)
            micro.advantages = (micro.credit[micro.sequence_of_token] - penalty) * micro.loss_mask
            micro.returns = micro.advantages
            if world.reports_losses:
                report_rewards(micro, penalty, meter)
                report_tokens(micro, meter)
                report_mismatch(micro, batch.engines, meter)
                report_correction(micro, self._settings.correction, meter)
        return batch

    def policy_loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """The clipped surrogate."""
        return self._loss(logprobs, entropy, micro, meter)

    def value_loss(self, values: torch.Tensor, micro: MicroBatch, meter: Statistics) -> torch.Tensor:  # noqa: ARG002
        """GRPO has no critic."""
        raise TypeError("GRPO has no critic to train")
