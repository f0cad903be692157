"""The optimizer steps of one training step, for any model that learns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megarl.core.batch import MicroBatch, MiniBatch, TrainBatch
from megarl.core.errors import DataError
from megarl.metrics.meter import Meter
from megarl.metrics.values import Loss
from megarl.models.optim import Trainable
from megarl.models.packed import PackedMicroBatch
from megarl.models.pipeline import forward_backward

logger = logging.getLogger(__name__)

# what a model says about a micro-batch's tokens: some [T] tensors
Predictions = tuple[torch.Tensor, ...]
# the last stage's output for a micro-batch -> predictions
Predict = Callable[[torch.Tensor, PackedMicroBatch], Predictions]
# predictions, their micro-batch, where to put statistics -> this micro-batch's part of the loss
TokenLoss = Callable[[Predictions, MicroBatch, Meter], torch.Tensor]

_MAX_SKIPS_IN_A_ROW = 3


class Updater:
    """Runs optimizer steps and keeps count of those that a non-finite number forced it to skip."""

    def __init__(self, trainable: Trainable, prefix: str) -> None:
        self._trainable = trainable
        self._layout = trainable.model.layout
        self._world = self._layout.world
        self._prefix = prefix
        self._skips_in_a_row = 0

    def run(self, batch: TrainBatch, num_epochs: int, predict: Predict, loss: TokenLoss) -> Meter:
        """``num_epochs`` passes over the mini-batches, one optimizer step for each. Collective."""
        meter = Meter()
        with self._layout.active():
            for _ in range(num_epochs):
                for minibatch in batch.minibatches:
                    meter.merge(self._optimizer_step(minibatch, predict, loss))
            self._trainable.finish_gathering()
        return meter

    def state(self) -> dict[str, int]:
        """How near the run is to giving up."""
        return {"skips_in_a_row": self._skips_in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._skips_in_a_row = int(state["skips_in_a_row"])

    def _optimizer_step(self, minibatch: MiniBatch, predict: Predict, loss: TokenLoss) -> Meter:
        meter = Meter()
        suspects: list[int] = []

        def measured(output: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
            predictions = predict(output, packed)
            value = loss(predictions, packed.micro, meter)
            if not torch.isfinite(value):
                suspects.extend(_non_finite_samples(predictions, packed.micro))
            return value

        self._trainable.zero_grad()
        forward_backward(self._trainable.chunks, minibatch.microbatches, measured, self._layout)
        result = self._trainable.step()
        if not self._world.reports_losses:
            # Tensor-parallel twins computed the same statistics; one of them speaks.
            meter = Meter()
        _close_update(meter)
        if result.skipped:
            self._report_skip(suspects, result.grad_norm)
            meter = Meter()
        else:
            self._skips_in_a_row = 0
            meter.mean(f"{self._prefix}/grad_norm", result.grad_norm, 1)
            meter.max(f"{self._prefix}/grad_norm_max", result.grad_norm)
        if self._world.is_driver:
            meter.sum(f"{self._prefix}/skipped_updates", float(result.skipped))
        meter.last(f"{self._prefix}/lr", result.lr)
        return meter

    def _report_skip(self, suspects: list[int], grad_norm: float) -> None:
        """Collective: the norm is global, so every rank is here. Names the samples behind a non-finite loss."""
        self._skips_in_a_row += 1
        found = self._world.gather(suspects)
        if found is not None:
            samples = sorted({index for part in found for index in part})
            names = ", ".join(str(index) for index in samples[:5]) or "none: the loss was finite, a gradient was not"
            logger.warning(
                "MRL-3001 %s: gradient norm is %s. The optimizer step was skipped on all ranks. Samples with a "
                "non-finite loss: %s.",
                self._prefix, grad_norm, names,
            )  # fmt: skip
        if self._skips_in_a_row >= _MAX_SKIPS_IN_A_ROW:
            raise DataError(
                "MRL-3002",
                f"{self._prefix}: {self._skips_in_a_row} optimizer steps in a row had a non-finite gradient. "
                "The weights are as they were before the first of them. Lower the learning rate or check the rewards.",
            )


def _close_update(meter: Meter) -> None:
    """All micro-batches of an optimizer step are in: its losses count as one."""
    for name, statistic in list(meter.statistics.items()):
        if isinstance(statistic, Loss):
            meter.loss(name, 0.0, num_updates=1)


def _non_finite_samples(predictions: Predictions, micro: MicroBatch) -> list[int]:
    """Samples whose predictions, advantages or returns are not finite; all of the micro-batch if none stands out."""
    bad = ~torch.isfinite(torch.stack(predictions).detach()).all(dim=0)
    for column in (micro.advantages, micro.returns, micro.old_logprobs):
        if column is not None:
            bad = bad | ~torch.isfinite(column)
    rows = torch.unique(micro.sequence_of_token[bad.to(micro.cu_seqlens.device)])
    chosen = micro.sample_index[rows] if rows.numel() else micro.sample_index
    return [int(index) for index in chosen if index >= 0]
