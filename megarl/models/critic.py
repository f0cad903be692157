"""The critic: a decoder with a value head, trained to foresee returns."""

from __future__ import annotations

import torch

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Algorithm
from megarl.metrics.meter import Meter
from megarl.models.decoder import Decoder, ValueModel
from megarl.models.learner import Learner
from megarl.models.optim import OptimizerSettings, TrainingOptions
from megarl.models.packed import PackedMicroBatch
from megarl.models.pipeline import forward_only
from megarl.models.update import Predictions
from megarl.ops.logprobs import align_to_tokens


class Critic(Learner):
    """Values before the update (`annotate`), and the update itself.

    ``values[t]`` judges the state in which token ``t`` is chosen: it is read from the output at ``t - 1``, like a
    log-prob.
    """

    forward_phase = "critic/compute_values"
    train_phase = "critic/train_step"
    annotation_timer = "timing_s/values"
    update_timer = "timing_s/update_critic"
    columns: tuple[str, ...] = ("values",)

    def __init__(self, model: ValueModel, settings: OptimizerSettings, options: TrainingOptions) -> None:
        super().__init__("critic", model, settings, options)
        self.model = model

    def copy_from(self, source: Decoder) -> None:
        """Start from another model's weights, with the own head. Collective."""
        self.model.copy_from(source)
        self._trainable.refresh_main_weights()

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``values``. Collective."""
        microbatches = list(batch.microbatches())
        with self.model.layout.active():
            results = forward_only(self._trainable.chunks, microbatches, self._read, self.model.layout)
        for micro, result in zip(microbatches, results, strict=True):
            micro.values = result[0] * micro.loss_mask
        return batch

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step: every epoch's optimizer steps. Collective."""

        def loss(predictions: Predictions, micro: MicroBatch, meter: Meter) -> torch.Tensor:
            return algorithm.value_loss(predictions[0], micro, meter)

        return self._updater.run(batch, algorithm.num_epochs, self._predict, loss)

    def _predict(self, output: torch.Tensor, packed: PackedMicroBatch) -> Predictions:
        return (align_to_tokens(self.model.token_values(output, packed)),)

    def _read(self, output: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
        return torch.stack(self._predict(output, packed))
