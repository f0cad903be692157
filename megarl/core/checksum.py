"""One checksum for weights, computed alike by the trainer and by every engine."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from megarl.core.seeding import derive_seed

_MASK = (1 << 63) - 1


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Checksum of one parameter's bits. A changed bit, a swapped pair of elements or another name changes it."""
    content = tensor.detach().contiguous().reshape(-1).cpu().view(torch.uint8).numpy()
    return derive_seed(name, tuple(tensor.shape).__str__(), zlib.crc32(content))


def combine(checksums: Iterable[int]) -> int:
    """Combine per-parameter checksums; the order of arrival does not matter."""
    return sum(checksums) & _MASK
