"""Flat ranges of boxes as rectangles, so that any layout can be copied into any other.

A flat range of a row-major box is a head, a middle and a tail of rows, and so on inside the head and the tail: a few
rectangles, each contiguous in the range. Two ranges of two boxes of one tensor share elements exactly where their
rectangles overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megarl.core.slices import Box


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Elements of a flat range that form a rectangle: ``position`` is where they begin in the range, ``offset`` is
    where they lie in the whole tensor.
    """

    position: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The rectangle as a view of the flat range."""
        return flat[self.position : self.position + math.prod(self.shape)].view(self.shape)


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a rectangle of a source and one of a target have in common."""

    source: Rectangle
    target: Rectangle
    low: tuple[int, ...]
    high: tuple[int, ...]

    def of_source(self, flat: torch.Tensor) -> torch.Tensor:
        """The common elements in the source's range."""
        return self._of(self.source, flat)

    def of_target(self, flat: torch.Tensor) -> torch.Tensor:
        """The common elements in the target's range."""
        return self._of(self.target, flat)

    def _of(self, rectangle: Rectangle, flat: torch.Tensor) -> torch.Tensor:
        part = rectangle.of(flat)
        for axis, (low, high) in enumerate(zip(self.low, self.high, strict=True)):
            part = part.narrow(axis, low - rectangle.offset[axis], high - low)
        return part


def rectangles(box: Box, start: int, end: int) -> list[Rectangle]:
    """Elements ``start`` to ``end`` of the box, in order, as at most ``2 * dimensions - 1`` rectangles."""
    found: list[Rectangle] = []

    def cut(index: tuple[int, ...], start: int, end: int, position: int) -> None:
        """``index`` fixes the leading dimensions; the range is inside what they leave."""
        if start == end:
            return
        inner = box.shape[len(index) :]
        row_size = math.prod(inner[1:])
        if start % row_size == 0 == end % row_size:
            place = (*index, start // row_size, *(0 for _ in inner[1:]))
            offset = tuple(base + step for base, step in zip(box.offset, place, strict=True))
            shape = (*(1 for _ in index), (end - start) // row_size, *inner[1:])
            found.append(Rectangle(position, offset, shape))
            return
        row = start // row_size
        if end <= (row + 1) * row_size:  # inside one row
            cut((*index, row), start - row * row_size, end - row * row_size, position)
            return
        whole_from, whole_to = -(-start // row_size) * row_size, end // row_size * row_size
        if start < whole_from:
            cut((*index, row), start - row * row_size, row_size, position)
        cut(index, whole_from, whole_to, position + whole_from - start)
        if whole_to < end:
            cut((*index, whole_to // row_size), 0, end - whole_to, position + whole_to - start)

    if not box.shape:  # a single number
        return [Rectangle(0, (), ())] if start < end else []
    cut((), start, end, 0)
    return found


def overlaps(sources: list[Rectangle], targets: list[Rectangle]) -> Iterator[Overlap]:
    """All non-empty common parts."""
    for target in targets:
        for source in sources:
            low = tuple(max(pair) for pair in zip(source.offset, target.offset, strict=True))
            high = tuple(
                min(a + n, b + m)
                for a, n, b, m in zip(source.offset, source.shape, target.offset, target.shape, strict=True)
            )
            if all(first < last for first, last in zip(low, high, strict=True)):
                yield Overlap(source, target, low, high)
