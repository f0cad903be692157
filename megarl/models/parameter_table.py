"""Which Hugging Face tensors live in which Megatron parameter, and how tensor parallelism cuts them.

The table is arithmetic on the model's shape alone, so every rank knows the parameters of every pipeline stage without
asking. It covers both layer specs: the local one, and Transformer Engine's, which fuses a norm into the linear layer
behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megarl.config.model_shape import ModelShape

VALUE_HEAD = "value_head.weight"


class Cut(Protocol):
    """How one Megatron parameter relates to whole Hugging Face tensors. ``local`` and ``whole`` are inverse."""

    @property
    def split_dim(self) -> int | None:
        """The dimension that tensor parallelism splits; None if every rank has all of it."""

    def local(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        """This rank's parameter, from whole tensors."""

    def whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole tensors, from every rank's parameter in rank order."""


class Replicated:
    """The same on every rank."""

    split_dim: int | None = None

    def local(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:  # noqa: ARG002
        return whole[0]

    def whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[0]]


class InputColumns:
    """A row-parallel linear layer: the input dimension is split."""

    split_dim: int | None = 1

    def local(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return whole[0].chunk(size, dim=1)[rank]

    def whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(parts), dim=1)]


@dataclass(frozen=True, slots=True)
class VocabRows:
    """An embedding or output layer: vocabulary rows are split after padding with zeros."""

    vocab_size: int
    split_dim: int | None = 0

    def local(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        padding = -self.vocab_size % size
        padded = torch.cat([whole[0], whole[0].new_zeros(padding, whole[0].size(1))]) if padding else whole[0]
        return padded.chunk(size)[rank]

    def whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(parts))[: self.vocab_size]]


class GateUp:
    """SwiGLU's two projections in one layer: each rank holds its rows of gate, then its rows of up."""

    split_dim: int | None = 0

    def local(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        return torch.cat([tensor.chunk(size)[rank] for tensor in whole])

    def whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        halves = [part.chunk(2) for part in parts]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """Queries, keys and values in one layer, query group by query group: (its queries, its key, its value)."""

    num_groups: int
    queries_per_group: int
    head_dim: int
    split_dim: int | None = 0

    def local(self, whole: Sequence[torch.Tensor], rank: int, size: int) -> torch.Tensor:
        grouped = torch.cat([t.view(self.num_groups, -1, self.head_dim, *t.shape[1:]) for t in whole], dim=1)
        return grouped.chunk(size)[rank].flatten(0, 2)

    def whole(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        joined = torch.cat(list(parts))
        grouped = joined.view(self.num_groups, self.queries_per_group + 2, self.head_dim, *joined.shape[1:])
        return [t.flatten(0, 2) for t in torch.split(grouped, [self.queries_per_group, 1, 1], dim=1)]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter of one pipeline stage."""

    name: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    cut: Cut
    # A tied embedding lives on the first and on the last stage; only the first one exports it.
    exported: bool = True


def parameter_table(shape: ModelShape, pp_size: int, stage: int, *, fused_norms: bool) -> list[Parameter]:
    """All parameters of a stage, in the order of the layers."""
    table: list[Parameter] = []
    vocab = (shape.vocab_size, shape.hidden_size)
    if stage == 0:
        names = ("model.embed_tokens.weight",)
        table.append(Parameter("embedding.word_embeddings.weight", names, (vocab,), VocabRows(shape.vocab_size)))
    num_local = shape.num_layers // pp_size
    for local_layer in range(num_local):
        table.extend(_layer(shape, local_layer, stage * num_local + local_layer, fused_norms=fused_norms))
    if stage == pp_size - 1:
        hidden = (shape.hidden_size,)
        table.append(Parameter("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,), Replicated()))
        if not shape.tied_embeddings or stage > 0:
            name = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
            cut = VocabRows(shape.vocab_size)
            table.append(Parameter("output_layer.weight", (name,), (vocab,), cut, exported=not shape.tied_embeddings))
    return table


def value_table(shape: ModelShape, pp_size: int, stage: int, *, fused_norms: bool) -> list[Parameter]:
    """The same for a value model: one output per token instead of a vocabulary."""
    language_model = parameter_table(shape, pp_size, stage, fused_norms=fused_norms)
    table = [entry for entry in language_model if entry.name != "output_layer.weight"]
    if stage == pp_size - 1:
        table.append(Parameter("output_layer.weight", (VALUE_HEAD,), ((1, shape.hidden_size),), Replicated()))
    return table


def _layer(shape: ModelShape, local_layer: int, layer: int, *, fused_norms: bool) -> list[Parameter]:
    ours, theirs = f"decoder.layers.{local_layer}.", f"model.layers.{layer}."
    hidden, queries = (shape.hidden_size,), shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    qkv = FusedQKV(shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    qkv_names = [f"{theirs}self_attn.{x}_proj" for x in "qkv"]
    qkv_rows = (queries, keys, keys)
    mlp = (shape.intermediate_size, shape.hidden_size)
    if fused_norms:
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    else:
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")

    def whole(name: str, hf_name: str, tensor_shape: tuple[int, ...]) -> Parameter:
        return Parameter(ours + name, (theirs + hf_name,), (tensor_shape,), Replicated())

    table = [whole(norms[0], "input_layernorm.weight", hidden)]
    weights = tuple(f"{name}.weight" for name in qkv_names)
    shapes = tuple((rows, shape.hidden_size) for rows in qkv_rows)
    table.append(Parameter(f"{ours}self_attention.linear_qkv.weight", weights, shapes, qkv))
    if shape.qkv_bias:
        biases = tuple(f"{name}.bias" for name in qkv_names)
        bias_shapes = tuple((rows,) for rows in qkv_rows)
        table.append(Parameter(f"{ours}self_attention.linear_qkv.bias", biases, bias_shapes, qkv))
    if shape.qk_norm:
        table.append(whole("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", (shape.head_dim,)))
        table.append(whole("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", (shape.head_dim,)))
    projection = (f"{theirs}self_attn.o_proj.weight",)
    table += [
        Parameter(
            f"{ours}self_attention.linear_proj.weight", projection, ((shape.hidden_size, queries),), InputColumns()
        ),
        whole(norms[1], "post_attention_layernorm.weight", hidden),
        Parameter(
            f"{ours}mlp.linear_fc1.weight",
            (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight"),
            (mlp, mlp),
            GateUp(),
        ),
        Parameter(f"{ours}mlp.linear_fc2.weight", (f"{theirs}mlp.down_proj.weight",), (mlp[::-1],), InputColumns()),
    ]
    return table
