"""Tensors in the form that SGLang's ``/update_weights_from_tensor`` wants.

That form is a pickle which holds no data, only where the data is: the name of a shared memory file, or a CUDA handle.
SGLang leaves no choice here. This file writes such payloads and never reads one; nothing else in megarl does either
(`tests/unit/test_structure.py`).
"""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as shared
from torch.multiprocessing import reductions

from megarl.core.bucket import NamedTensor, lay_out, pack, unpack

# of the device's number in what torch writes for a CUDA tensor
_DEVICE_ARGUMENT = 6


class SglangPayload:
    """One bucket, shared. `text` must be asked once for every process that will read it: a payload is single-use."""

    def __init__(self, tensors: Sequence[NamedTensor]) -> None:
        if tensors[0][1].is_cuda:
            self._tensors = list(tensors)
            self._file: Path | None = None
            return
        pieces, num_bytes = lay_out(tensors)
        with _shared_by_name():
            flat = torch.empty(num_bytes, dtype=torch.uint8).share_memory_()
            self._file = Path("/dev/shm") / flat.untyped_storage()._share_filename_cpu_()[1].decode().lstrip("/")
        pack(tensors, pieces, flat)
        self._tensors = unpack(pieces, flat)

    def text(self) -> str:
        """For one process. The payload must be kept until that process has answered."""
        written = io.BytesIO()
        with _shared_by_name():
            _Writer(written).dump(self._tensors)
        return base64.b64encode(written.getvalue()).decode()

    @property
    def file(self) -> Path | None:
        """What stays in the file system if a process dies with its payload unread; nothing on CUDA."""
        return self._file


class _Writer(ForkingPickler):
    """Names a CUDA device by its UUID: SGLang may number devices differently. Has not been run on a GPU yet."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return NotImplemented
        function, arguments = reductions.reduce_tensor(value)
        uuid = str(torch.cuda.get_device_properties(value.device).uuid)
        return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Torch's usual way hands over file descriptors, which only relatives of this process can take."""
    before = shared.get_sharing_strategy()
    shared.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        shared.set_sharing_strategy(before)
