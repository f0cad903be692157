"""The reference: a frozen policy that the trained one is held close to."""

from __future__ import annotations

import torch

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import OffloadPart
from megarl.core.world import World
from megarl.models.decoder import LanguageModel
from megarl.models.memory import weights_part
from megarl.models.pipeline import forward_only


class Reference:
    """Log-probs under frozen weights."""

    forward_phase = "reference/compute_log_probs"
    annotation_timer = "timing_s/ref"

    def __init__(self, model: LanguageModel, world: World, temperature: float) -> None:
        self.model = model
        self._world = world
        self._temperature = temperature
        model.module.requires_grad_(False)
        self.parts: dict[str, OffloadPart] = {"reference.weights": weights_part(model.module)}

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``ref_logprobs``. Collective."""

        def read(output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
            return self.model.token_logprobs(output, micro, self._temperature)[0][None]

        microbatches = list(batch.microbatches())
        for micro, result in zip(
            microbatches, forward_only(self.model.module, microbatches, read, self._world), strict=True
        ):
            micro.ref_logprobs = result[0] * micro.loss_mask
        return batch
