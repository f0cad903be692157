"""The policy: the model that is trained to act."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Algorithm, OffloadPart
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.models.decoder import LanguageModel
from megarl.models.memory import gradients_part, optimizer_part, weights_part
from megarl.models.optim import OptimizerSettings, Trainable
from megarl.models.pipeline import forward_only
from megarl.models.update import Updater


class Policy:
    """Log-probs and entropies before the update (`annotate`), and the update itself."""

    forward_phase = "actor_train/compute_log_probs"
    train_phase = "actor_train/train_step"
    annotation_timer = "timing_s/old_log_prob"
    update_timer = "timing_s/update_actor"

    def __init__(self, model: LanguageModel, world: World, settings: OptimizerSettings, temperature: float) -> None:
        self._model = model
        self._world = world
        self._temperature = temperature
        self._trainable = Trainable(model.module, settings)
        self._updater = Updater(self._trainable, world, "actor")
        self.parts: dict[str, OffloadPart] = {
            "actor.weights": weights_part(model.module),
            "actor.grads": gradients_part(self._trainable),
            "actor.optimizer": optimizer_part(self._trainable),
        }

    @property
    def model(self) -> LanguageModel:
        """The model that is being trained."""
        return self._model

    def begin_stage(self, settings: OptimizerSettings, temperature: float) -> None:
        """Keep the weights, start the optimizer afresh.

        Log-probs are those of the distribution that the stage's tokens come from, so its temperature is part of the
        model; demonstrations have none.
        """
        self._temperature = temperature
        self._trainable.restart(settings)

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``old_logprobs`` and ``entropy``. Collective."""

        def read(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            return torch.stack(self._model.token_logprobs(output, micro, self._temperature))

        microbatches = list(batch.microbatches())
        for micro, result in zip(
            microbatches, forward_only(self._trainable.ddp, microbatches, read, self._world), strict=True
        ):
            micro.old_logprobs, micro.entropy = result * micro.loss_mask
        return batch

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step: every epoch's optimizer steps. Collective."""

        def loss(output: torch.Tensor, micro: MicroBatch, meter: Meter) -> torch.Tensor:
            logprobs, entropy = self._model.token_logprobs(output, micro, self._temperature)
            return algorithm.policy_loss(logprobs, entropy, micro, meter)

        return self._updater.run(batch, algorithm.num_epochs, loss)

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of (Hugging Face name, whole tensor). Collective over the replica's ranks."""
        return self._model.export()
