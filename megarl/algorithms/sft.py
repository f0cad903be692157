"""SFT: supervised fine-tuning, the same loop with demonstrations in the place of samples.

Every token of a demonstration counts alike: the loss is the negative log-likelihood, -log p(token).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.algorithms.losses import report_samples
from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Statistics
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.ops.masked import total


class Sft:
    """Negative log-likelihood of demonstrations."""

    num_epochs = 1

    def credit_groups(self, groups: Sequence[Group], meter: Statistics) -> None:
        """Demonstrations need no credit."""

    def credit_tokens(self, batch: TrainBatch, world: World, meter: Statistics) -> TrainBatch:  # noqa: ARG002
        """Demonstrations need no credit."""
        return batch

    def policy_loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """Negative log-likelihood."""
        loss = -(logprobs * micro.loss_weight).sum()
        meter.loss("actor/sft_loss", loss.detach())
        meter.loss("actor/total_loss", loss.detach())
        meter.mean("actor/entropy", total(entropy.detach() * micro.loss_mask), total(micro.loss_mask))
        report_samples(micro, meter)
        return loss

    def value_loss(self, values: torch.Tensor, micro: MicroBatch, meter: Statistics) -> torch.Tensor:  # noqa: ARG002
        """SFT has no critic."""
        raise TypeError("SFT has no critic to train")
