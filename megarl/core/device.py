"""The platform layer: the only place, with the layer spec in `models/build.py`, that knows CPU from CUDA.

On CUDA the device is a GPU and offloading moves bytes to pinned host memory. On CPU the device is this process: its
memory is the resident set, and offloading moves bytes out of it, into an anonymous memory file of the kernel. Both
really release what they moved. The CUDA side has not been run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from megarl.core.errors import ConfigError

GIB = float(2**30)
# what a container may use, and uses: in the kernel's second and first way of telling
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_USAGES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


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


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of one device at one moment, in GiB. ``max_*`` are peaks since `reset_peak_memory`.

    On CUDA the first four are the caching allocator's; ``device_used`` is what the driver says is taken on the device,
    by whomever (a generation server beside us is invisible to the allocator). On CPU they are the resident set of this
    process and its high-water mark: a process has no caching allocator, so reserved equals allocated.
    """

    allocated: float
    reserved: float
    max_allocated: float
    max_reserved: float
    device_used: float | None = None
    # how often the allocator had to give cached memory back and try again, since the process began
    num_retries: int | None = None


def read_memory(device: torch.device) -> MemoryReading:
    """The device's memory now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return MemoryReading(
            torch.cuda.memory_allocated(device) / GIB,
            torch.cuda.memory_reserved(device) / GIB,
            torch.cuda.max_memory_allocated(device) / GIB,
            torch.cuda.max_memory_reserved(device) / GIB,
            (total - free) / GIB,
            int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)),
        )
    resident, peak = _status_gib("VmRSS"), _status_gib("VmHWM")
    return MemoryReading(resident, resident, peak, peak)


def device_memory(device: torch.device) -> float:
    """What the device holds, in GiB; on CPU that is the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory / GIB
    return host_memory()


def host_memory() -> float:
    """What processes on this host, or in this container, may use in all, in GiB."""
    return min(psutil.virtual_memory().total, _of_container(_LIMITS)) / GIB


def host_memory_used() -> tuple[float, float]:
    """Memory in use on this host in GiB, and as a fraction: of the container's limit where that is the smaller one."""
    host = psutil.virtual_memory()
    limit, used = _of_container(_LIMITS), _of_container(_USAGES)
    bounded = limit < host.total and used < math.inf
    return host.used / GIB, used / limit if bounded else host.used / host.total


def process_memory() -> tuple[float, float]:
    """(rss, vms) of this process in GiB."""
    return _status_gib("VmRSS"), _status_gib("VmSize")


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak: of the caching allocator on CUDA, of the resident set on CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # a kernel that refuses leaves the peak of the whole process
        Path("/proc/self/clear_refs").write_text("5")


def physical_index(device: torch.device, local_rank: int) -> int:
    """The device's number on its node, whichever of them this process sees; on CPU every process is a device."""
    if device.type != "cuda":
        return local_rank
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index if device.index is not None else local_rank
    # Entries may also be UUIDs, which have no number: then the visible order has to do.
    return int(visible[index]) if index < len(visible) and visible[index].strip().isdigit() else index


def device_name(device: torch.device) -> tuple[str, str]:
    """(model, UUID) of the device; a CPU has no UUID."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return properties.name, str(getattr(properties, "uuid", ""))
    return "cpu", ""


def _status_gib(field: str) -> float:
    """A figure of the kernel's about this process."""
    content = Path("/proc/self/status").read_bytes()
    start = content.index(field.encode() + b":") + len(field) + 1
    return int(content[start : content.index(b"kB", start)]) * 1024 / GIB


def _of_container(paths: tuple[str, ...]) -> float:
    """A figure of this container's in bytes; infinite if there is none."""
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max": no limit
            return float(Path(path).read_text())
    return math.inf


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
