"""What is offloaded is really gone, and comes back bit for bit."""

from __future__ import annotations

from typing import Any

import torch

NUM_BYTES = 200 * 2**20


def offload_job(world: Any) -> dict[str, Any]:
    """Offload 200 MB twice and watch the resident set."""
    import os

    import psutil

    from megarl.core.device import OffloadedStorage, release_freed_memory

    def resident() -> int:
        release_freed_memory(world.device)
        return psutil.Process().memory_info().rss

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    num_files = open_files()
    tensor = torch.randn(NUM_BYTES // 4, generator=torch.Generator().manual_seed(0))
    tensor[17] = float("nan")
    view, twisted = tensor[1000:2000], tensor.view(-1, 64).T
    picked = torch.arange(0, tensor.numel(), 9973)
    expected, address = tensor[picked].clone(), tensor.untyped_storage()._cdata
    checksum = tensor.view(torch.int32).sum(dtype=torch.int64)
    kept = OffloadedStorage(tensor.untyped_storage())
    resident_sizes, held = [resident()], []
    for _ in range(2):
        kept.store()
        resident_sizes.append(resident())
        held.append((kept.num_bytes, tensor.untyped_storage().nbytes()))
        kept.restore()
        resident_sizes.append(resident())
        held.append((kept.num_bytes, tensor.untyped_storage().nbytes()))
        assert torch.equal(tensor.view(torch.int32).sum(dtype=torch.int64), checksum)
        assert torch.equal(tensor[picked].view(torch.int32), expected.view(torch.int32))
        tensor[5] += 1  # what is written between two cycles is kept as well
        checksum = tensor.view(torch.int32).sum(dtype=torch.int64)
    assert tensor.untyped_storage()._cdata == address
    assert torch.equal(view, tensor[1000:2000])
    assert torch.equal(twisted.T.reshape(-1)[picked].view(torch.int32), tensor[picked].view(torch.int32))
    del kept
    return {"resident": resident_sizes, "held": held, "files": open_files() - num_files}


def test_offloaded_memory_is_released_and_returns_bit_for_bit(gang: Any) -> None:
    (result,) = gang(1).run(offload_job)
    before, gone, back, gone_again, back_again = result["resident"]
    slack = 20 * 2**20  # what else the process allocates in the meantime
    for absent in (gone, gone_again):
        assert before - absent > NUM_BYTES - slack
    for present in (back, back_again):
        assert abs(present - before) < slack
    assert result["held"] == [(NUM_BYTES, 0), (0, NUM_BYTES)] * 2
    assert result["files"] == 0, "the memory file outlived its owner"


def parts_job(world: Any) -> None:
    """Parts: storages that are shared move once, what has no bytes is left alone, gradients need not survive."""
    import pytest

    from megarl.models.memory import OffloadablePart, ScratchPart, weights_part

    flat = torch.arange(12.0)
    module = torch.nn.Module()
    module.first, module.second = torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:].view(2, 4))
    module.register_buffer("table", torch.tensor([3.0]))
    module.register_buffer("nothing", torch.zeros(0))
    part = weights_part([module])
    assert (part.num_bytes, part.resident) == (52, True)
    for _ in range(2):
        part.offload()
        assert (part.num_bytes, part.resident, flat.untyped_storage().nbytes()) == (0, False, 0)
        with pytest.raises(AssertionError):
            part.offload()  # a second copy would be of nothing, and replace the first
        part.onload()
        assert (part.num_bytes, part.resident) == (52, True)
        assert module.first.tolist() == [0, 1, 2, 3]
        assert module.second.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        assert module.table.tolist() == [3]
        assert module.first.untyped_storage()._cdata == module.second.untyped_storage()._cdata

    moments: list[torch.Tensor] = []
    growing = OffloadablePart(lambda: [moment.untyped_storage() for moment in moments])
    for size in (0, 3, 5):  # Adam's moments appear with the first step; a restart replaces them
        moments[:] = [torch.full((size,), float(size))] if size else []
        growing.offload()
        growing.onload()
        assert growing.num_bytes == 4 * size
        assert all(moment.tolist() == [size] * size for moment in moments)

    gradients = torch.ones(6)
    scratch = ScratchPart(lambda: [gradients.untyped_storage()])
    scratch.offload()
    assert (scratch.num_bytes, scratch.resident) == (0, False)
    with pytest.raises(AssertionError):
        scratch.offload()
    scratch.onload()
    assert (scratch.num_bytes, scratch.resident) == (24, True)
    assert gradients.zero_().tolist() == [0] * 6


def test_parts_move_what_they_hold(gang: Any) -> None:
    gang(1).run(parts_job)
