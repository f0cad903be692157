"""One checksum for weights, computed alike by the trainer and by every engine."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable

import torch

from megarl.core.seeding import derive_seed

_MASK = (1 << 63) - 1


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Checksum of one parameter's bits. A changed bit, a swapped pair of elements or another name changes it."""
    plain = tensor.detach().contiguous().cpu()
    # Not as a numpy array: a storage that numpy has seen once can never be released again.
    content = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    return derive_seed(name, tuple(tensor.shape).__str__(), zlib.crc32(content))


def combine(checksums: Iterable[int]) -> int:
    """Combine per-parameter checksums; the order of arrival does not matter."""
    return sum(checksums) & _MASK
