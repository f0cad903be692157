"""The reference: a frozen policy that the trained one is held close to."""

from __future__ import annotations

from typing import Any

import torch

from megarl.core.batch import TrainBatch
from megarl.core.protocols import OffloadPart
from megarl.core.slices import Slice
from megarl.models.decoder import Decoder, LanguageModel
from megarl.models.memory import weights_part
from megarl.models.packed import PackedMicroBatch
from megarl.models.pipeline import forward_only
from megarl.models.state import FrozenState


class Reference:
    """Log-probs under frozen weights."""

    forward_phase = "reference/compute_log_probs"
    annotation_timer = "timing_s/ref"
    columns: tuple[str, ...] = ("ref_logprobs",)

    def __init__(self, model: LanguageModel, temperature: float) -> None:
        self.model = model
        self._temperature = temperature
        # weights that came from the policy cannot be read again from where it started
        self._copied = False
        self._saved = FrozenState("reference", model)
        for chunk in model.chunks:
            chunk.requires_grad_(False)
        self.parts: dict[str, OffloadPart] = {"reference.weights": weights_part(model.chunks)}

    def copy_from(self, source: Decoder) -> None:
        """Freeze another model's weights. Collective."""
        self.model.copy_from(source)
        self._copied = True

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill ``ref_logprobs``. Collective."""

        def read(hidden: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
            return self.model.token_logprobs(hidden, packed, self._temperature)[0][None]

        microbatches = list(batch.microbatches())
        with self.model.layout.active():
            results = forward_only(self.model.chunks, microbatches, read, self.model.layout)
        for micro, result in zip(microbatches, results, strict=True):
            micro.ref_logprobs = result[0] * micro.loss_mask
        return batch

    def slices(self) -> list[Slice]:
        """The weights, if they differ from those that a new run would start with."""
        return self._saved.slices() if self._copied else []

    def state(self) -> dict[str, Any]:
        """Whether the weights are saved."""
        return {"copied": self._copied}

    def make_room(self, state: dict[str, Any]) -> list[Slice]:
        """Take over a saved state; the returned slices must be filled."""
        self._copied = bool(state["copied"])
        return self._saved.make_room() if self._copied else []

    def restored(self) -> None:
        """Nothing is derived from the weights."""
