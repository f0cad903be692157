"""Buckets of weights: how a sender cuts them, and how their bytes lie side by side for whoever takes them out.

A bucket on the road is one flat stretch of bytes and a manifest of pieces. The manifest comes from another process, so
whoever reads one checks every number of it before touching the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NamedTensor = tuple[str, torch.Tensor]
# SGLang's word for how tensors are sent, in megarl's own way: a manifest, and memory to read them from
SHARED_MEMORY = "megarl_shared_memory"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# of every piece's first byte, so that a view of any dtype is aligned
_ALIGNMENT = 64
_MAX_DIMENSIONS = 8


class BadManifest(ValueError):
    """A manifest that does not describe a bucket."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a bucket: its Hugging Face name, and where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def tree(self) -> dict[str, Any]:
        """As JSON."""
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "offset": self.offset}


def dtype_name(tensor: torch.Tensor) -> str:
    """The tensor's dtype as manifests, and SGLang, call it."""
    return _DTYPE_NAMES[tensor.dtype]


def num_bytes(tensors: Iterable[NamedTensor]) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)


def recut(buckets: Iterable[Sequence[NamedTensor]], max_bytes: int) -> Iterator[tuple[list[NamedTensor], bool]]:
    """The same tensors in the same order, in buckets of at most ``max_bytes`` (or of one tensor), each with whether it
    is the last. The source is always read to its end, and no tensor is copied.
    """
    held: list[NamedTensor] = []
    size = 0
    for bucket in buckets:
        for name, tensor in bucket:
            more = tensor.numel() * tensor.element_size()
            if held and size + more > max_bytes:
                yield held, False
                held, size = [], 0
            held.append((name, tensor))
            size += more
    if held:
        yield held, True


def lay_out(tensors: Sequence[NamedTensor]) -> tuple[list[Piece], int]:
    """Where each tensor goes, and how many bytes that takes."""
    pieces, end = [], 0
    for name, tensor in tensors:
        pieces.append(Piece(name, dtype_name(tensor), tuple(tensor.shape), end))
        end += -(-pieces[-1].num_bytes // _ALIGNMENT) * _ALIGNMENT
    return pieces, end


def pack(tensors: Sequence[NamedTensor], pieces: Sequence[Piece], flat: torch.Tensor) -> None:
    """Copy the tensors to their places in ``flat``, which holds bytes."""
    for (_, tensor), piece, place in zip(tensors, pieces, unpack(pieces, flat), strict=True):
        assert piece.num_bytes == tensor.numel() * tensor.element_size()
        place[1].copy_(tensor.detach())


def unpack(pieces: Sequence[Piece], flat: torch.Tensor) -> list[NamedTensor]:
    """The tensors as views of ``flat``."""
    tensors = []
    for piece in pieces:
        stretch = flat[piece.offset : piece.offset + piece.num_bytes]
        tensors.append((piece.name, stretch.view(DTYPES[piece.dtype]).view(piece.shape)))
    return tensors


def read_pieces(trees: Any, room: int) -> list[Piece]:
    """Pieces from JSON, all of them within ``room`` bytes. Raises `BadManifest`."""
    if not isinstance(trees, list) or not trees:
        raise BadManifest("a bucket's manifest must be a list of pieces that is not empty")
    pieces = [_read_piece(tree) for tree in trees]
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if piece.offset < end or piece.offset % _ALIGNMENT:
            raise BadManifest(f"{piece.name[:80]!a} begins at byte {piece.offset}, inside another piece or unaligned")
        end = piece.offset + piece.num_bytes
    if end > room:
        raise BadManifest(f"the pieces end at byte {end}; there are {room}")
    return pieces


def read_shape(value: Any, what: str) -> tuple[int, ...]:
    """A shape from JSON. Raises `BadManifest`."""
    valid = isinstance(value, list) and len(value) <= _MAX_DIMENSIONS
    if not valid or not all(type(size) is int and 0 < size < 2**40 for size in value) or math.prod(value) > 2**48:
        raise BadManifest(f"{what}: the shape must be a list of a few positive integers")
    return tuple(value)


def _read_piece(tree: Any) -> Piece:
    if not isinstance(tree, Mapping) or tree.keys() != {"name", "dtype", "shape", "offset"}:
        raise BadManifest("a piece of a manifest must have name, dtype, shape and offset")
    name, dtype, offset = tree["name"], tree["dtype"], tree["offset"]
    if not isinstance(name, str) or not name:
        raise BadManifest("a piece's name must be a text")
    what = ascii(name[:80])
    if dtype not in DTYPES:
        raise BadManifest(f"{what}: the dtype must be one of {', '.join(DTYPES)}")
    if type(offset) is not int or not 0 <= offset < 2**48:
        raise BadManifest(f"{what}: the offset must be a number of bytes")
    return Piece(name, dtype, read_shape(tree["shape"], what), offset)
