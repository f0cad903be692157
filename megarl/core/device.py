"""The platform layer: the only place, with the layer spec in `models/build.py`, that knows CPU from CUDA.

On CUDA the device is a GPU and offloading moves bytes to pinned host memory. On CPU the device is this process: its
memory is the resident set, and offloading moves bytes out of it, into an anonymous memory file of the kernel. Both
really release what they moved. The CUDA side has not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from megarl.core.errors import ConfigError

GIB = float(2**30)


def choose_device(requested: str, local_rank: int) -> torch.device:
    """The device of this rank: ``auto`` takes CUDA when there is one."""
    if requested == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "MRL-1111", "run.device=cuda, but torch finds no CUDA device here. Write run.device=cpu or auto."
        )
    if requested == "cuda" or (requested == "auto" and torch.cuda.is_available()):
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def collective_backend(device: torch.device) -> str:
    """The torch.distributed backend of model-parallel groups. The control group is gloo on every platform."""
    return "nccl" if device.type == "cuda" else "gloo"


def make_deterministic() -> None:
    """Only kernels that give the same bits every time; before the first use of a device.

    The variables are read by Transformer Engine and cuBLAS; torch refuses operations that it knows to be otherwise.
    """
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)


def training_dtype(device: torch.device) -> torch.dtype:
    """bf16 with fp32 main gradients on CUDA; fp32 on CPU, where bf16 is many times slower."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait for queued kernels, so that a clock read afterwards tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_freed_memory(device: torch.device) -> None:
    """Hand memory that tensors gave up back to the device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        ctypes.CDLL(None).malloc_trim(0)


def process_memory() -> tuple[float, float]:
    """(rss, vms) of this process in GiB."""
    info = psutil.Process().memory_info()
    return info.rss / GIB, info.vms / GIB


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak: of the caching allocator on CUDA, of the resident set on CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # a kernel that refuses leaves the peak of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> tuple[float, float]:
    """(allocated, reserved) peaks in GiB since `reset_peak_memory`; on CPU the kernel's high-water mark, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB, torch.cuda.max_memory_reserved(device) / GIB
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kilobytes * 1024 / GIB, kilobytes * 1024 / GIB


class OffloadedStorage:
    """The bytes of one tensor storage, kept outside device memory.

    ``store`` empties the storage; ``restore`` fills it again bit for bit. Every view of the storage stays valid
    across the cycle, because the storage object itself is never replaced.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._num_bytes = 0
        self._pinned: torch.Tensor | None = None
        self._memory_file: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes kept outside the device now."""
        return self._num_bytes

    def store(self) -> None:
        """Move the bytes out and release the device memory."""
        self._num_bytes = self._storage.nbytes()
        if self._storage.device.type == "cuda":
            if self._pinned is None:
                self._pinned = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=True)
            self._pinned.copy_(_as_bytes(self._storage))
        else:
            if self._memory_file is None:
                self._memory_file = os.memfd_create("megarl-offload")
            _transfer(os.pwrite, self._memory_file, _as_memory(self._storage))
        self._storage.resize_(0)

    def restore(self) -> None:
        """Take the device memory again and bring the bytes back."""
        self._storage.resize_(self._num_bytes)
        if self._pinned is not None:
            _as_bytes(self._storage).copy_(self._pinned)
        else:
            assert self._memory_file is not None, "restore() before store()"
            _transfer(_read, self._memory_file, _as_memory(self._storage))
            # The copy is of no use any more; keeping it would double the host's memory.
            os.ftruncate(self._memory_file, 0)
        self._num_bytes = 0

    def __del__(self) -> None:
        if self._memory_file is not None:
            os.close(self._memory_file)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _as_memory(storage: torch.UntypedStorage) -> memoryview:
    """The storage's bytes in place. A numpy view would do too, but torch never again resizes a storage that numpy
    saw.
    """
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _read(fd: int, view: memoryview, offset: int) -> int:
    return os.preadv(fd, [view], offset)


def _transfer(move: Callable[[int, memoryview, int], int], fd: int, view: memoryview) -> None:
    """Repeat a positional read or write until the whole view went through (one call moves at most 2 GiB)."""
    done = 0
    while done < len(view):
        moved = move(fd, view[done:], done)
        if moved == 0:
            raise OSError("the offload file ended early")
        done += moved
