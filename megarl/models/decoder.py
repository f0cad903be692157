"""A decoder on Megatron: its weights by Hugging Face name, and what it says about tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from megarl.config.model_shape import ModelShape
from megarl.models.build import ModelOptions, build_chunks, padded_vocab_size
from megarl.models.cuts import Parameter
from megarl.models.heads import ValueHead, VocabularyHead
from megarl.models.hf_weights import (
    WeightSource,
    export_weights,
    import_weights,
    random_weights,
    safetensors_weights,
    take_exported,
)
from megarl.models.layout import Layout
from megarl.models.packed import PackedMicroBatch
from megarl.models.parameter_table import Naming, has_value_bias, stage_tables
from megarl.ops.logprobs import align_to_tokens, hidden_logprobs, next_tokens


def initial_weights(shape: ModelShape, path: Path | None, seed: int, setting: str = "model.path") -> WeightSource:
    """The tensors of the Hugging Face directory that ``setting`` names, or random ones."""
    return safetensors_weights(path, setting) if path is not None else random_weights(seed, shape.initializer_range)


class Decoder:
    """This rank's chunks of a decoder, and where its weights belong. Subclasses say what its last stage does."""

    value_head = False

    def __init__(self, shape: ModelShape, layout: Layout, options: ModelOptions, source: WeightSource) -> None:
        self.shape = shape
        self.layout = layout
        self.options = options
        naming = Naming(layout.world.device.type == "cuda", self.value_head, layout.parallel.ep_size)
        self.tables = stage_tables(shape, layout.chunk_layers(shape.num_layers), naming)
        with layout.active():
            self.chunks = build_chunks(shape, layout, options)
            if layout.world.is_last_stage:
                last = self.chunks[-1]
                last.output_layer = (
                    ValueHead(last, bias=has_value_bias(shape)) if self.value_head else VocabularyHead(last)
                )
            if self.value_head:
                for chunk in self.chunks:
                    chunk.share_embeddings_and_output_weights = False
            import_weights(self.chunks, self.table, source, layout.world)

    @property
    def table(self) -> list[Parameter]:
        """The parameters of this rank's pipeline stage."""
        return self.tables[self.layout.world.pp.rank]

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Buckets of (Hugging Face name, whole tensor). Collective: every rank must run it to its end."""
        return export_weights(self.chunks, self.tables, self.layout.world)

    def copy_from(self, source: Decoder) -> None:
        """Take over the weights of a decoder of the same shape, in whatever layout; heads of another kind stay.
        Collective.
        """
        for bucket in source.export():
            take_exported(self.chunks, self.table, self.layout.world, dict(bucket))


class LanguageModel(Decoder):
    """A decoder with a vocabulary head: log-probs and entropies of packed tokens."""

    def token_logprobs(
        self, hidden: torch.Tensor, packed: PackedMicroBatch, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T] log-probs and entropies, aligned to the tokens, from the last stage's ``[local tokens, hidden]``.
        Collective over tensor- and context-parallel ranks.
        """
        tp = self.layout.world.tp
        width = padded_vocab_size(self.shape, tp.size) // tp.size
        first_column = tp.rank * width
        logprobs, entropy = hidden_logprobs(
            hidden,
            self._output_weight(),
            next_tokens(packed.micro.token_ids)[packed.token_index],
            group=tp.group,
            first_column=first_column,
            num_columns=max(0, min(width, self.shape.vocab_size - first_column)),
            temperature=temperature,
            chunk_tokens=self.options.logprob_chunk_tokens,
        )
        # apart, so that an entropy that no loss uses costs nothing in the backward pass
        return align_to_tokens(packed.to_tokens(logprobs)), align_to_tokens(packed.to_tokens(entropy))

    def _output_weight(self) -> torch.Tensor:
        last = self.chunks[-1]
        weight: torch.Tensor = (
            last.shared_embedding_or_output_weight() if self.shape.tied_embeddings else last.output_layer.weight
        )
        return weight


class ValueModel(Decoder):
    """A decoder with one number per token: a critic's values, or a reward model's scores."""

    value_head = True

    def token_values(self, output: torch.Tensor, packed: PackedMicroBatch) -> torch.Tensor:
        """[T] values, each of what was read up to and including its token. Collective over context-parallel ranks."""
        return packed.to_tokens(output[:, 0])
