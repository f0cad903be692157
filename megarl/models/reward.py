"""A reward model: a frozen decoder with a sequence-classification head, in any layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.batch import MicroBatch
from megarl.core.protocols import OffloadPart
from megarl.models.decoder import ValueModel
from megarl.models.memory import weights_part
from megarl.models.packed import PackedMicroBatch
from megarl.models.pipeline import forward_only


class RewardModel:
    """One score per sequence: the head's number at the last token, as Hugging Face's sequence classifiers read it."""

    forward_phase = "reward/compute_rewards"

    def __init__(self, model: ValueModel) -> None:
        self.model = model
        for chunk in model.chunks:
            chunk.requires_grad_(False)
        self.parts: dict[str, OffloadPart] = {"reward.weights": weights_part(model.chunks)}

    def score(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """``[sequences]`` scores of every micro-batch, on every rank. Collective."""

        def read(output: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
            return self.model.token_values(output, packed)[None]

        with self.model.layout.active():
            values = forward_only(self.model.chunks, microbatches, read, self.model.layout)
        last_tokens = [micro.cu_seqlens[1:].long() - 1 for micro in microbatches]
        return [value[0][last] for value, last in zip(values, last_tokens, strict=True)]
