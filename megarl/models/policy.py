"""The policy: the model that is trained to act."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Algorithm
from megarl.metrics.meter import Meter
from megarl.models.decoder import LanguageModel
from megarl.models.learner import Learner
from megarl.models.optim import OptimizerSettings, TrainingOptions
from megarl.models.packed import PackedMicroBatch
from megarl.models.pipeline import forward_only
from megarl.models.update import Predictions


class Policy(Learner):
    """Log-probs and entropies before the update (`annotate`), and the update itself."""

    forward_phase = "actor_train/compute_log_probs"
    train_phase = "actor_train/train_step"
    annotation_timer = "timing_s/old_log_prob"
    update_timer = "timing_s/update_actor"
    columns: tuple[str, ...] = ("old_logprobs", "entropy")

    def __init__(
        self, model: LanguageModel, settings: OptimizerSettings, options: TrainingOptions, temperature: float
    ) -> None:
        super().__init__("actor", model, settings, options)
        self.model = model
        self._temperature = temperature

    def begin_stage(self, settings: OptimizerSettings, temperature: float) -> None:
        """Keep the weights, start the optimizer afresh."""
        self._trainable.restart(settings)
        self._temperature = temperature

    def configure(self, settings: OptimizerSettings, temperature: float) -> None:
        """What holds for a whole stage of training, also when a run resumes in the middle of it.

        Log-probs are those of the distribution that the stage's tokens come from, so its temperature is part of the
        model; demonstrations have none.
        """
        self._temperature = temperature
        self._trainable.configure(settings)

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``old_logprobs`` and ``entropy``. Collective."""

        def read(hidden: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
            return torch.stack(self.model.token_logprobs(hidden, packed, self._temperature))

        microbatches = list(batch.microbatches())
        with self.model.layout.active():
            results = forward_only(self._trainable.chunks, microbatches, read, self.model.layout)
        for micro, result in zip(microbatches, results, strict=True):
            micro.old_logprobs, micro.entropy = result * micro.loss_mask
        return batch

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step: every epoch's optimizer steps. Collective."""

        def predict(hidden: torch.Tensor, packed: PackedMicroBatch) -> Predictions:
            return self.model.token_logprobs(hidden, packed, self._temperature)

        def loss(predictions: Predictions, micro: MicroBatch, meter: Meter) -> torch.Tensor:
            logprobs, entropy = predictions
            return algorithm.policy_loss(logprobs, entropy, micro, meter)

        return self._updater.run(batch, algorithm.num_epochs, predict, loss)

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of (Hugging Face name, whole tensor). Collective over all ranks."""
        return self.model.export()
