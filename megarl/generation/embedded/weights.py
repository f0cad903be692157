"""The decoder's parameters: stored fused for speed, addressed by their Hugging Face names.

Two departures from the Hugging Face layout make decoding faster, and neither shows outside this file:

- queries, keys and values are one matrix, gate and up are one matrix, experts are stacked: fewer, larger products;
- the rows of each query and key head are reordered from rotate-half pairs ``(i, i + head_dim / 2)`` to neighbours
  ``(2i, 2i + 1)``, so that the rotary embedding is one complex multiplication. Queries and keys are reordered alike,
  so their products do not change.

Matrices that every token is multiplied with serve in packed form (`matrix`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megarl.config.model_shape import ExpertShape, ModelShape
from megarl.core.checksum import combine, tensor_checksum
from megarl.core.errors import EngineError
from megarl.generation.embedded.matrix import Matrix

_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A gated MLP. ``gate_up`` rows are gate, then up."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The experts of a sparse layer, stacked along the first axis: each is an MLP.

    ``routers`` has a row per expert; if there is a shared expert, the row of its gate follows.
    """

    routers: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``qkv`` rows are query heads, then key heads, then value heads."""

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    attention_out: Matrix
    post_norm: torch.Tensor
    mlp: MlpWeights | ExpertWeights


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a named parameter lives: a view into the fused storage, and the shape that Hugging Face gives it.

    ``matrix`` is what the view is a part of, if it serves in packed form.
    """

    view: torch.Tensor
    shape: tuple[int, ...]
    matrix: Matrix | None

    def write(self, tensor: torch.Tensor) -> None:
        self.view.copy_(tensor.detach().reshape(self.view.shape))

    def read(self, whole: torch.Tensor | None) -> torch.Tensor:
        """The parameter, out of the values of its matrix."""
        if whole is None:
            return self.view.reshape(self.shape)
        return whole.as_strided(self.view.size(), self.view.stride(), self.view.storage_offset()).reshape(self.shape)


class DecoderWeights:
    """All parameters. They are written between `open` and `seal`, each of them, and served after it.

    Their memory can be given back to the system and taken again.
    """

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._places: dict[str, _Place] = {}
        self._tensors: list[tuple[torch.Tensor, int]] = []  # what is always plain, and its bytes
        self._matrices: list[Matrix] = []
        self.embedding = self._add("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self.layers = [self._add_layer(index) for index in range(shape.num_layers)]
        self.final_norm = self._add("model.norm.weight", shape.hidden_size)
        if shape.tied_embeddings:
            self.head = Matrix(self.embedding, is_shared=True)
            self._matrices.append(self.head)
        else:
            self.head = self._add_matrix([("lm_head.weight", shape.vocab_size)], shape.hidden_size)

    @property
    def names(self) -> frozenset[str]:
        """Every parameter's Hugging Face name."""
        return frozenset(self._places)

    @property
    def num_bytes(self) -> int:
        """Bytes held now; 0 while released."""
        plain = sum(tensor.untyped_storage().nbytes() for tensor, _ in self._tensors)
        return plain + sum(matrix.num_bytes for matrix in self._matrices)

    def open(self) -> None:
        """Get ready to be written; the values are undefined."""
        for matrix in self._matrices:
            matrix.open()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy one parameter into its place."""
        place = self._places.get(name)
        if place is None:
            raise EngineError(
                "MRL-5102", f"weight update: {_excerpt(name)} is not a parameter of {self._describe(name)}"
            )
        if tuple(tensor.shape) != place.shape:
            raise EngineError(
                "MRL-5103", f"weight update: {name} has shape {list(tensor.shape)}; it must be {list(place.shape)}."
            )
        place.write(tensor)

    def seal(self) -> None:
        """Get ready to serve what was written, one matrix after the other."""
        for matrix in self._matrices:
            matrix.seal()

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter that is served, as Hugging Face lays it out."""
        matrix, whole = None, None
        for name, place in self._places.items():
            if place.matrix is not matrix:
                matrix = place.matrix
                whole = matrix.values() if matrix else None
            yield name, place.read(whole)

    def checksum(self) -> int:
        """The checksum that `core.checksum` defines, over every parameter."""
        return combine(tensor_checksum(name, tensor) for name, tensor in self.items())

    def release(self) -> None:
        """Give the memory back; the values are lost."""
        for tensor, _ in self._tensors:
            tensor.untyped_storage().resize_(0)
        for matrix in self._matrices:
            matrix.release()

    def resume(self) -> None:
        """Take the memory again; the values are undefined."""
        for tensor, num_bytes in self._tensors:
            tensor.untyped_storage().resize_(num_bytes)
        self.open()

    def _describe(self, name: str) -> str:
        hint = ""
        if name == "lm_head.weight" and self._shape.tied_embeddings:
            hint = " Its embeddings are tied: send model.embed_tokens.weight alone."
        return f"this {self._shape.architecture} with {self._shape.num_layers} layers.{hint}"

    def _take(self, *size: int) -> torch.Tensor:
        taken = torch.empty(size, device=self._device, dtype=self._dtype)
        self._tensors.append((taken, taken.untyped_storage().nbytes()))
        return taken

    def _add(self, name: str, *size: int) -> torch.Tensor:
        return self._add_fused([(name, size[0])], *size[1:])

    def _add_fused(self, parts: list[tuple[str, int]], *trailing: int) -> torch.Tensor:
        """Several named parameters of equal width, one below the other."""
        fused = self._take(sum(num_rows for _, num_rows in parts), *trailing)
        self._name_parts(parts, fused, None)
        return fused

    def _add_matrix(self, parts: list[tuple[str, int]], num_columns: int) -> Matrix:
        """Several named parameters of equal width, one below the other, to be multiplied with."""
        num_rows = sum(count for _, count in parts)
        plain = torch.empty(num_rows, num_columns, device=self._device, dtype=self._dtype)
        matrix = Matrix(plain)
        self._matrices.append(matrix)
        self._name_parts(parts, plain, matrix)
        return matrix

    def _name_parts(self, parts: list[tuple[str, int]], fused: torch.Tensor, matrix: Matrix | None) -> None:
        start = 0
        for name, num_rows in parts:
            self._places[name] = _Place(fused[start : start + num_rows], (num_rows, *fused.shape[1:]), matrix)
            start += num_rows

    def _pair_rotary(self, name: str) -> None:
        """Let what is written under this name land in neighbouring pairs (see the top of the file)."""
        place, half = self._places[name], self._shape.head_dim // 2
        paired = place.view.view(-1, half, 2, *place.shape[1:]).transpose(1, 2)
        self._places[name] = _Place(paired, place.shape, place.matrix)

    def _add_mlp(self, prefix: str, intermediate_size: int) -> MlpWeights:
        hidden = self._shape.hidden_size
        gate_up = [(f"{prefix}.{part}_proj.weight", intermediate_size) for part in ("gate", "up")]
        return MlpWeights(
            gate_up=self._add_matrix(gate_up, hidden),
            down=self._add_matrix([(f"{prefix}.down_proj.weight", hidden)], intermediate_size),
        )

    def _add_experts(self, prefix: str, experts: ExpertShape) -> ExpertWeights:
        hidden, intermediate, shared = self._shape.hidden_size, experts.intermediate_size, None
        routers = [(f"{prefix}.gate.weight", experts.num_experts)]
        if experts.shared_intermediate_size:
            routers.append((f"{prefix}.shared_expert_gate.weight", 1))
            shared = self._add_mlp(f"{prefix}.shared_expert", experts.shared_intermediate_size)
        gate_up = self._take(experts.num_experts, 2 * intermediate, hidden)
        down = self._take(experts.num_experts, hidden, intermediate)
        for index in range(experts.num_experts):
            name = f"{prefix}.experts.{index}"
            for part, view in zip(("gate", "up"), gate_up[index].chunk(2), strict=True):
                self._places[f"{name}.{part}_proj.weight"] = _Place(view, (intermediate, hidden), None)
            self._places[f"{name}.down_proj.weight"] = _Place(down[index], (hidden, intermediate), None)
        return ExpertWeights(self._add_fused(routers, hidden), gate_up, down, shared)

    def _add_layer(self, index: int) -> LayerWeights:
        shape, prefix = self._shape, f"model.layers.{index}"
        attention, experts = f"{prefix}.self_attn", shape.experts if shape.is_sparse(index) else None
        hidden, query_size, kv_size = shape.hidden_size, _query_size(shape), _kv_size(shape)

        def projections(kind: str) -> list[tuple[str, int]]:
            sizes = {"q": query_size, "k": kv_size, "v": kv_size}
            return [(f"{attention}.{letter}_proj.{kind}", size) for letter, size in sizes.items()]

        layer = LayerWeights(
            input_norm=self._add(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._add_matrix(projections("weight"), hidden),
            qkv_bias=self._add_fused(projections("bias")) if shape.qkv_bias else None,
            query_norm=self._add(f"{attention}.q_norm.weight", shape.head_dim) if shape.qk_norm else None,
            key_norm=self._add(f"{attention}.k_norm.weight", shape.head_dim) if shape.qk_norm else None,
            attention_out=self._add_matrix([(f"{attention}.o_proj.weight", hidden)], query_size),
            post_norm=self._add(f"{prefix}.post_attention_layernorm.weight", hidden),
            mlp=(
                self._add_experts(f"{prefix}.mlp", experts)
                if experts
                else self._add_mlp(f"{prefix}.mlp", shape.intermediate_size)
            ),
        )
        for letter in ("q", "k"):
            for suffix in ("_proj.weight", "_proj.bias", "_norm.weight"):
                if f"{attention}.{letter}{suffix}" in self._places:
                    self._pair_rotary(f"{attention}.{letter}{suffix}")
        return layer


def name_some(names: Iterable[str]) -> str:
    """A few of the names, in order, and how many more there are."""
    listed = sorted(names)
    rest = f" and {len(listed) - _MAX_NAMED} more" if len(listed) > _MAX_NAMED else ""
    return ", ".join(listed[:_MAX_NAMED]) + rest


def _query_size(shape: ModelShape) -> int:
    return shape.num_heads * shape.head_dim


def _kv_size(shape: ModelShape) -> int:
    return shape.num_kv_heads * shape.head_dim


def _excerpt(name: str) -> str:
    return ascii(name[:80])
