"""How one Megatron parameter relates to Hugging Face tensors, and how parallel ranks share it.

A cut answers four questions, all by arithmetic: which part of each tensor a rank must read, how these parts become the
rank's parameter, how all ranks' parameters become the tensors again, and which boxes of layout-free tensors the
parameter consists of (for checkpoints).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from megarl.core.slices import Box

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Elements ``start`` to ``stop`` of a tensor along ``dim``."""

    dim: int
    start: int
    stop: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The part, as a view."""
        return whole.narrow(self.dim, self.start, self.stop - self.start)


class Cut(Protocol):
    """``join(needed parts)`` and ``whole(all parameters)`` are inverse, whatever the number of ranks."""

    @property
    def split_dim(self) -> int | None:
        """The dimension of the parameter that is split; None if every rank has all of it."""

    def needed(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Part]:
        """What rank ``rank`` of ``size`` needs of each Hugging Face tensor."""

    def join(self, parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        """The rank's parameter, with ``rows`` rows, from the parts that it needed."""

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The Hugging Face tensors, from every rank's parameter in rank order."""

    def boxes(self, names: Sequence[str], shapes: Sequence[Shape], rank: int, size: int) -> list[Box]:
        """What the rank's parameter holds, in the order of its memory. What is left of the parameter is padding."""


def _even_part(dim: int, length: int, rank: int, size: int) -> Part:
    step = length // size
    return Part(dim, rank * step, (rank + 1) * step)


def _box(name: str, shape: Shape, part: Part) -> Box:
    offset, extent = [0] * len(shape), list(shape)
    offset[part.dim], extent[part.dim] = part.start, part.stop - part.start
    return Box(name, tuple(shape), tuple(offset), tuple(extent))


class Replicated:
    """The same on every rank."""

    split_dim: int | None = None

    def needed(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Part]:  # noqa: ARG002
        return [Part(0, 0, shapes[0][0])]

    def join(self, parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:  # noqa: ARG002
        return parts[0]

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [parameters[0]]

    def boxes(self, names: Sequence[str], shapes: Sequence[Shape], rank: int, size: int) -> list[Box]:
        return [_box(names[0], shapes[0], *self.needed(shapes, rank, size))]


class InputColumns:
    """A row-parallel linear layer: the input dimension is split."""

    split_dim: int | None = 1

    def needed(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Part]:
        return [_even_part(1, shapes[0][1], rank, size)]

    def join(self, parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:  # noqa: ARG002
        return parts[0]

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(parameters), dim=1)]

    def boxes(self, names: Sequence[str], shapes: Sequence[Shape], rank: int, size: int) -> list[Box]:
        return [_box(names[0], shapes[0], *self.needed(shapes, rank, size))]


@dataclass(frozen=True, slots=True)
class VocabRows:
    """An embedding or output layer: vocabulary rows are split after padding them with zeros to a multiple."""

    vocab_size: int
    split_dim: int | None = 0

    def needed(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Part]:  # noqa: ARG002
        rows = -(-self.vocab_size // size)
        return [Part(0, min(rank * rows, self.vocab_size), min((rank + 1) * rows, self.vocab_size))]

    def join(self, parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        padding = rows - parts[0].size(0)
        return torch.cat([parts[0], parts[0].new_zeros(padding, parts[0].size(1))]) if padding else parts[0]

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat(list(parameters))[: self.vocab_size]]

    def boxes(self, names: Sequence[str], shapes: Sequence[Shape], rank: int, size: int) -> list[Box]:
        return [_box(names[0], shapes[0], *self.needed(shapes, rank, size))]


class GateUp:
    """SwiGLU's two projections in one layer: each rank holds its rows of gate, then its rows of up."""

    split_dim: int | None = 0

    def needed(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Part]:
        return [_even_part(0, shape[0], rank, size) for shape in shapes]

    def join(self, parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:  # noqa: ARG002
        return torch.cat(list(parts))

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        halves = [parameter.chunk(2) for parameter in parameters]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]

    def boxes(self, names: Sequence[str], shapes: Sequence[Shape], rank: int, size: int) -> list[Box]:
        parts = self.needed(shapes, rank, size)
        return [_box(*each) for each in zip(names, shapes, parts, strict=True)]


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """Queries, keys and values in one layer, query group by query group: (its queries, its key, its value).

    In checkpoints the fused layer is one tensor, because its rows are split evenly and its three sources are not
    contiguous in it.
    """

    num_groups: int
    queries_per_group: int
    head_dim: int
    split_dim: int | None = 0

    def needed(self, shapes: Sequence[Shape], rank: int, size: int) -> list[Part]:
        return [_even_part(0, shape[0], rank, size) for shape in shapes]

    def join(self, parts: Sequence[torch.Tensor], rows: int) -> torch.Tensor:
        num_groups = rows // ((self.queries_per_group + 2) * self.head_dim)
        grouped = [part.reshape(num_groups, -1, self.head_dim, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, dim=1).flatten(0, 2)

    def whole(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        joined = torch.cat(list(parameters))
        grouped = joined.view(self.num_groups, self.queries_per_group + 2, self.head_dim, *joined.shape[1:])
        return [t.flatten(0, 2) for t in torch.split(grouped, [self.queries_per_group, 1, 1], dim=1)]

    def boxes(self, names: Sequence[str], shapes: Sequence[Shape], rank: int, size: int) -> list[Box]:
        name = names[0].replace(".q_proj.", ".qkv_proj.")
        rows = sum(shape[0] for shape in shapes)
        return [_box(name, (rows, *shapes[0][1:]), _even_part(0, rows, rank, size))]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One Megatron parameter of one pipeline stage."""

    name: str
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    cut: Cut
    # the model chunk of the stage (interleaved pipelines have several)
    chunk: int = 0
    # A tied embedding lives on the first and on the last stage; only the first one exports and saves it.
    exported: bool = True
    # the expert-parallel rank that has it, if it belongs to an expert
    ep_rank: int | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensors."""
        return sum(math.prod(shape) for shape in self.hf_shapes)

    def boxes(self, rank: int = 0, size: int = 1) -> list[Box]:
        """What rank ``rank`` of ``size`` holds of it."""
        return self.cut.boxes(self.hf_names, self.hf_shapes, rank, size)

    def on(self, chunk: int, prefix: str = "") -> Parameter:
        """The same parameter in another chunk, under another module."""
        return replace(self, name=prefix + self.name, chunk=chunk)
