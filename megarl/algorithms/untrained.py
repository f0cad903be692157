"""For runs that record rollouts and train nothing: samples get credit, so that it is reported; tokens do not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Algorithm, Statistics
from megarl.core.sample import Group
from megarl.core.world import World


class Untrained:
    """An algorithm up to the point where models would be needed."""

    def __init__(self, algorithm: Algorithm) -> None:
        self._algorithm = algorithm

    @property
    def num_epochs(self) -> int:
        """There is nothing to go over."""
        return 0

    def credit_groups(self, groups: Sequence[Group], meter: Statistics) -> None:
        """As the algorithm would."""
        self._algorithm.credit_groups(groups, meter)

    def credit_tokens(self, batch: TrainBatch, world: World, meter: Statistics) -> TrainBatch:  # noqa: ARG002
        """No model said anything about the tokens."""
        return batch

    def policy_loss(
        self, logprobs: torch.Tensor, entropy: torch.Tensor, micro: MicroBatch, meter: Statistics
    ) -> torch.Tensor:
        """Never asked for: there is no learner."""
        return self._algorithm.policy_loss(logprobs, entropy, micro, meter)

    def value_loss(self, values: torch.Tensor, micro: MicroBatch, meter: Statistics) -> torch.Tensor:
        """Never asked for: there is no learner."""
        return self._algorithm.value_loss(values, micro, meter)
