"""State that is cut over ranks at random, and checkpoints of it, without any process but this one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megarl.checkpoint.commit import Save, commit, stage, write_file
from megarl.checkpoint.rank_file import take_snapshot
from megarl.core.slices import Box, Slice

Layout = list[list[Slice]]  # the slices of each rank


def grid(name: str, shape: tuple[int, ...], draw: random.Random) -> Iterator[Box]:
    """Boxes that tile a tensor: every axis is cut at random places."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = [((), ())]
    for size in shape:
        cuts = sorted(draw.sample(range(1, size), draw.randint(0, min(2, size - 1)))) if size > 1 else []
        spans = list(zip([0, *cuts], [*cuts, size], strict=True))
        boxes = [((*low, a), (*sides, b - a)) for low, sides in boxes for a, b in spans]
    return (Box(name, shape, low, sides) for low, sides in boxes)


def cut(tensors: Mapping[str, torch.Tensor], num_ranks: int, draw: random.Random, *, empty: bool = False) -> Layout:
    """Every element of every tensor in exactly one slice of one rank. ``empty``: room for it instead of the values."""
    layout: Layout = [[] for _ in range(num_ranks)]
    for name, tensor in tensors.items():
        for box in grid(name, tuple(tensor.shape), draw):
            size = box.num_elements
            cuts = sorted(draw.sample(range(size + 1), min(draw.randint(0, 3), size)))
            flat = part_of(tensor, box)
            for start, end in zip([0, *cuts], [*cuts, size], strict=True):
                memory = torch.zeros(end - start, dtype=tensor.dtype) if empty else flat[start:end].clone()
                draw.choice(layout).append(Slice(box, start, end, memory))
    return layout


def part_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """What a box holds, flat."""
    for axis, (low, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        tensor = tensor.narrow(axis, low, size)
    return tensor.reshape(-1)


def save_layout(directory: Path, step: int, layout: Sequence[Sequence[Slice]]) -> None:
    """What the ranks of a run do together, one after the other."""
    saves = [
        Save(
            step,
            take_snapshot(slices, {"rng": torch.tensor([rank])}),
            {"step": step},
            {"num_ranks": len(layout)},
            9,
            None,
        )
        for rank, slices in enumerate(layout)
    ]
    staging = directory / stage(directory, saves[0])
    commit(staging, saves[0], [write_file(staging, save, rank) for rank, save in enumerate(saves)])


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(math.prod(shape)).to(dtype).reshape(shape)


def whole(name: str, tensor: torch.Tensor) -> Slice:
    """All of a tensor as one slice of its own memory."""
    shape = tuple(tensor.shape)
    return Slice(Box(name, shape, (0,) * len(shape), shape), 0, tensor.numel(), tensor.view(-1))
