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
    """One score per sequence: the head's number at the last token, as Hugging Face's sequence classifiers read it.

    They read it at the last token that is not ``pad_token_id``, also where a sequence itself ends with that token.
    """

    forward_phase = "reward/compute_rewards"

    def __init__(self, model: ValueModel, pad_token_id: int | None = None) -> None:
        self.model = model
        self._pad_token_id = pad_token_id
        for chunk in model.chunks:
            chunk.requires_grad_(False)
        self.parts: dict[str, OffloadPart] = {"reward_model.weights": weights_part(model.chunks)}

    def score(self, microbatches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        """``[sequences]`` scores of every micro-batch, on every rank of the replica. Collective."""

        def read(output: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
            return self.model.token_values(output, packed)[None]

        with self.model.layout.active():
            values = forward_only(self.model.chunks, microbatches, read, self.model.layout)
        return [value[0][self._read_at(micro)] for value, micro in zip(values, microbatches, strict=True)]

    def _read_at(self, micro: MicroBatch) -> torch.Tensor:
        """[sequences] the token of each at which its score is; the first one of a sequence of padding alone."""
        starts, ends = micro.cu_seqlens[:-1].long(), micro.cu_seqlens[1:].long()
        if self._pad_token_id is None:
            return ends - 1
        here = torch.arange(micro.num_tokens, device=starts.device)
        is_text = micro.token_ids != self._pad_token_id
        return starts.scatter_reduce(0, micro.sequence_of_token[is_text], here[is_text], "amax")
