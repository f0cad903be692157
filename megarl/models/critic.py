"""The critic: a decoder with a value head, trained to foresee returns."""

from __future__ import annotations

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Algorithm, OffloadPart
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.models.memory import gradients_part, optimizer_part, weights_part
from megarl.models.optim import OptimizerSettings, Trainable
from megarl.models.pipeline import forward_only
from megarl.models.update import Updater
from megarl.ops.logprobs import align_to_tokens


class Critic:
    """Values before the update (`annotate`), and the update itself.

    ``values[t]`` judges the state in which token ``t`` is chosen: it is read from the output at ``t - 1``, like a
    log-prob.
    """

    forward_phase = "critic/compute_values"
    train_phase = "critic/train_step"
    annotation_timer = "timing_s/values"
    update_timer = "timing_s/update_critic"

    def __init__(self, module: GPTModel, world: World, settings: OptimizerSettings) -> None:
        self.module = module
        self._world = world
        self._trainable = Trainable(module, settings)
        self._updater = Updater(self._trainable, world, "critic")
        self.parts: dict[str, OffloadPart] = {
            "critic.weights": weights_part(module),
            "critic.grads": gradients_part(self._trainable),
            "critic.optimizer": optimizer_part(self._trainable),
        }

    def refresh_main_weights(self) -> None:
        """After the weights were written from outside (a copy of the policy's)."""
        self._trainable.refresh_main_weights()

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``values``. Collective."""
        microbatches = list(batch.microbatches())
        for micro, result in zip(
            microbatches, forward_only(self._trainable.ddp, microbatches, _read, self._world), strict=True
        ):
            micro.values = result[0] * micro.loss_mask
        return batch

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step: every epoch's optimizer steps. Collective."""

        def loss(output: torch.Tensor, micro: MicroBatch, meter: Meter) -> torch.Tensor:
            return algorithm.value_loss(align_to_tokens(output[:, 0]), micro, meter)

        return self._updater.run(batch, algorithm.num_epochs, loss)


def _read(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:  # noqa: ARG001
    return align_to_tokens(output[:, 0])[None]
