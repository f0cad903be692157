"""One checksum for weights, computed alike by the trainer and by every engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megarl.core.seeding import derive_seed

_MASK = (1 << 63) - 1


def tensor_checksum(name: str, tensor: torch.Tensor) -> int:
    """Checksum of one parameter's bits. A changed bit, a swapped pair of elements or another name changes it."""
    flat = tensor.detach().contiguous().reshape(-1).cpu()
    words = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32).to(torch.int64)
    # Odd multipliers that vary with the position make the sum sensitive to order; int64 wraps around by design.
    position = torch.arange(words.numel(), dtype=torch.int64) * 2 + 1
    return derive_seed(name, tuple(tensor.shape).__str__(), int((words * position).sum().item()))


def combine(checksums: Iterable[int]) -> int:
    """Combine per-parameter checksums; the order of arrival does not matter."""
    return sum(checksums) & _MASK
