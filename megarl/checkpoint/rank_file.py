"""The file of one rank: its slices and its own small state, in safetensors, with the index in the file's metadata.

Every slice is stored flat. The index says of which box of which tensor it is a part, so a file can be understood
without the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.core import whereabouts
from megarl.core.device import synchronize
from megarl.core.faults import reach
from megarl.core.slices import Box, Slice

INDEX = "megarl_index"
STATE_PREFIX = "rank_state/"
_CHUNK_BYTES = 16 * 2**20
# safetensors' name of each type that state may have
_TYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice as it lies on disk: elements ``start`` to ``end`` of a box, under ``key`` in ``file``."""

    box: Box
    start: int
    end: int
    dtype: str
    file: str
    key: str


def file_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank_{rank:05d}.safetensors"


def dtype_name(dtype: torch.dtype) -> str:
    """How a file and messages call a type."""
    if dtype not in _TYPE_NAMES:
        raise TypeError(f"a tensor of {dtype} cannot be saved")
    return _TYPE_NAMES[dtype]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A rank's file in host memory: a header, and one buffer that nothing else refers to."""

    header: bytes
    buffer: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.buffer.numel()


def take_snapshot(slices: Sequence[Slice], rank_state: Mapping[str, torch.Tensor]) -> Snapshot:
    """Copy everything once, into one buffer of host memory. Live memory may change as soon as this returns."""
    tensors: dict[str, torch.Tensor] = {}
    index: dict[str, list[Any]] = {}
    for number, part in enumerate(slices):
        _require_consistent(part)
        key = f"{number}:{part.box.name}"
        tensors[key] = part.tensor
        index[key] = [part.box.whole_shape, part.box.offset, part.box.shape, part.start, part.end]
    tensors |= {STATE_PREFIX + name: tensor for name, tensor in rank_state.items()}
    # Widest elements first: then every tensor begins at a multiple of its own element size, without gaps, which the
    # format forbids.
    keys = sorted(tensors, key=lambda key: -tensors[key].element_size())
    spans: dict[str, tuple[int, int]] = {}
    num_bytes = 0
    for key in keys:
        spans[key] = (num_bytes, num_bytes + tensors[key].numel() * tensors[key].element_size())
        num_bytes = spans[key][1]
    devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
    buffer = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=bool(devices))
    for key in keys:
        whereabouts.tick()
        tensor = tensors[key].detach()
        place = buffer[slice(*spans[key])].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor, non_blocking=True)
    for device in devices:
        synchronize(device)
    header: dict[str, Any] = {"__metadata__": {INDEX: _compact(index)}}
    for key in keys:
        tensor = tensors[key]
        header[key] = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": spans[key]}
    return Snapshot(_padded(_compact(header).encode()), buffer)


def write_snapshot(snapshot: Snapshot, path: Path, *, rank: int, step: int) -> str:
    """Write a new file, sync it to the disk, and return the SHA-256 of what it should hold."""
    digest = hashlib.sha256()
    # The buffer is the snapshot's own and is never resized, so numpy may look at it.
    content = snapshot.buffer.numpy().data
    reach("save/staged", rank=rank, step=step)
    with open(path, "xb", buffering=0) as file:
        _write(file.fileno(), memoryview(snapshot.header), digest)
        reach("save/file-half-written", rank=rank, step=step)
        _write(file.fileno(), content, digest)
        reach("save/file-written", rank=rank, step=step)
        os.fsync(file.fileno())
    reach("save/file-synced", rank=rank, step=step)
    return digest.hexdigest()


def read_pieces(name: str, file: Any) -> list[Piece]:
    """The index of a file that is open as safetensors."""
    index = json.loads(file.metadata()[INDEX])
    pieces = []
    for key, (whole_shape, offset, shape, start, end) in index.items():
        box = Box(key.partition(":")[2], tuple(whole_shape), tuple(offset), tuple(shape))
        pieces.append(Piece(box, start, end, file.get_slice(key).get_dtype(), name, key))
    return pieces


def _require_consistent(part: Slice) -> None:
    """Wrong slices would be found at the next resume, when it is too late."""
    size = part.end - part.start
    inside = 0 <= part.start <= part.end <= part.box.num_elements
    if not inside or part.tensor.shape != (size,):
        raise ValueError(f"{part.box}: {tuple(part.tensor.shape)} elements for {part.start} to {part.end}")
    if size and not part.tensor.untyped_storage().nbytes():
        raise ValueError(f"{part.box.name} is offloaded: it has no memory that could be saved")


def _compact(tree: Any) -> str:
    return json.dumps(tree, separators=(",", ":"))


def _padded(header: bytes) -> bytes:
    """The header behind its length, filled up with spaces so that the data begins at a multiple of 8."""
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _write(fd: int, content: memoryview, digest: Any) -> None:
    """Write everything (a call may take only a part) and hash it while it is in the processor's cache."""
    for begin in range(0, len(content), _CHUNK_BYTES):
        whereabouts.tick()
        chunk = content[begin : begin + _CHUNK_BYTES]
        digest.update(chunk)
        while chunk:
            chunk = chunk[os.write(fd, chunk) :]
