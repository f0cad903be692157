"""Tensors in the form that SGLang's ``/update_weights_from_tensor`` wants: a pickle, which leaves no choice here.

This file writes such payloads and never reads one; nothing else in megarl does either (`tests/unit/test_structure.py`).

From a GPU the payload holds handles of the memory. From a CPU it holds the bytes. torch could share CPU memory by name
instead, but through a process of its own, ``torch_shm_manager``, which inherits our standard output and lives as long
as the server that read from it: whoever waits for the end of our output would wait for the end of SGLang.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from megarl.core.bucket import NamedTensor

# the place of the device's number in what torch writes for a CUDA tensor
_DEVICE_ARGUMENT = 6


def write_payload(tensors: Sequence[NamedTensor]) -> str:
    """The payload for one process. With tensors on a GPU it can be read once, and they must be kept until then."""
    written = io.BytesIO()
    # a view would bring the whole storage that it looks at
    _Writer(written).dump([(name, tensor if tensor.is_cuda else _alone(tensor)) for name, tensor in tensors])
    return base64.b64encode(written.getbuffer()).decode()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


class _Writer(ForkingPickler):
    """Handles for what is on a GPU, bytes for the rest."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _gpu_handle(value) if value.is_cuda else value.__reduce_ex__(2)  # type: ignore[no-untyped-call]
        if isinstance(value, torch.storage.TypedStorage):
            return value.__reduce__()  # type: ignore[no-untyped-call]
        return NotImplemented


def _gpu_handle(tensor: torch.Tensor) -> Any:
    """Names the device by its UUID: SGLang may number devices differently. Has not been run on a GPU yet."""
    function, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    uuid = str(torch.cuda.get_device_properties(tensor.device).uuid)
    return function, (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])
