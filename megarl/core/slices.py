"""How state that is spread over ranks is named, so that it can be saved in one layout and loaded in another.

A tensor of the model (or one of Adam's moments of it) has one name and one shape, whatever the layout. Tensor and
expert parallelism give a rank a *box* of it; the distributed optimizer gives a rank a flat range of that box. A
`Slice` is such a range together with the memory that holds it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular part of a named tensor."""

    name: str
    whole_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``start`` to ``end`` of a box in row-major order, and where they are.

    ``tensor`` is flat, has ``end - start`` elements and is the live memory: reading it saves, writing it restores.
    """

    box: Box
    start: int
    end: int
    tensor: torch.Tensor


class Stateful(Protocol):
    """A model whose training state can be saved and put back."""

    def slices(self) -> list[Slice]:
        """Everything of this rank that has to survive, none of it twice over all ranks."""

    def state(self) -> dict[str, Any]:
        """The rest, as plain data; equal on all ranks."""

    def make_room(self, state: dict[str, Any]) -> list[Slice]:
        """Take over a saved `state` and return the slices that have to be filled, on this rank, before `restored`."""

    def restored(self) -> None:
        """All slices are filled: bring copies of them up to date. Collective."""
