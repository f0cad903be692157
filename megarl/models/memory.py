"""What can leave the device: weights, gradients and optimizer state, each as a part that is resident or not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megarl.core.device import OffloadedStorage
from megarl.models.optim import Trainable

# gives the storages as they are now: Adam's moments appear only with the first step
Storages = Callable[[], Iterable[torch.UntypedStorage]]


class OffloadablePart:
    """Storages whose contents survive an offload bit for bit."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._copies: dict[int, OffloadedStorage] = {}
        self.resident = True

    def offload(self) -> None:
        """Move the contents out of device memory and release it."""
        assert self.resident, "a second offload would replace the copies by copies of nothing"
        present = [storage for storage in self._storages() if storage.nbytes()]
        # Host buffers are kept for reuse, those of storages that no longer exist are dropped.
        self._copies = {s._cdata: self._copies.get(s._cdata) or OffloadedStorage(s) for s in present}
        for copy in self._copies.values():
            copy.store()
        self.resident = False

    def onload(self) -> None:
        """Bring the contents back."""
        for copy in self._copies.values():
            copy.restore()
        self.resident = True

    @property
    def num_bytes(self) -> int:
        """Device bytes that the part takes now."""
        return sum(storage.nbytes() for storage in self._storages())


class ScratchPart:
    """Storages whose contents need not survive: gradients, which every optimizer step starts by zeroing."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._sizes: list[tuple[torch.UntypedStorage, int]] = []
        self.resident = True

    def offload(self) -> None:
        """Release the memory; the contents are lost."""
        assert self.resident, "a second offload would forget the sizes"
        self._sizes = [(storage, storage.nbytes()) for storage in self._storages() if storage.nbytes()]
        for storage, _ in self._sizes:
            storage.resize_(0)
        self.resident = False

    def onload(self) -> None:
        """Take the memory again; the contents are undefined."""
        for storage, size in self._sizes:
            storage.resize_(size)
        self.resident = True

    @property
    def num_bytes(self) -> int:
        """Device bytes that the part takes now."""
        return sum(storage.nbytes() for storage in self._storages())


def weights_part(chunks: Sequence[torch.nn.Module]) -> OffloadablePart:
    """A model's parameters and buffers. Parameters that are views of one buffer are moved once, with the buffer."""

    def storages() -> Iterable[torch.UntypedStorage]:
        tensors = (tensor for chunk in chunks for tensor in [*chunk.parameters(), *chunk.buffers()])
        return _distinct(tensor.untyped_storage() for tensor in tensors)

    return OffloadablePart(storages)


def gradients_part(trainable: Trainable) -> ScratchPart:
    """The flat gradient buffers."""
    buffers = [buffer for chunk in trainable.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    return ScratchPart(lambda: [buffer.grad_data.untyped_storage() for buffer in buffers])


def optimizer_part(trainable: Trainable) -> OffloadablePart:
    """Adam's moments, and the fp32 masters of bf16 weights. Step counters are a few bytes and stay."""
    device = next(trainable.model.chunks[0].parameters()).device

    def storages() -> Iterable[torch.UntypedStorage]:
        moments = (state[key] for state in trainable.moments() for key in ("exp_avg", "exp_avg_sq") if key in state)
        tensors = [*moments, *trainable.main_weights()]
        # an optimizer on the host has nothing to move
        return _distinct(tensor.untyped_storage() for tensor in tensors if tensor.device == device)

    return OffloadablePart(storages)


def _distinct(storages: Iterable[torch.UntypedStorage]) -> list[torch.UntypedStorage]:
    seen: dict[int, torch.UntypedStorage] = {}
    for storage in storages:
        seen.setdefault(storage._cdata, storage)
    return list(seen.values())
