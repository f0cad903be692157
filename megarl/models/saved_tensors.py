"""One parameter of a checkpoint's policy, whole. Apart from models: `megarl export` needs no more than this."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megarl.models.cuts import Parameter

# the name of a tensor in the checkpoint -> all of it
Read = Callable[[str], torch.Tensor]


def saved_tensors(read: Read, parameter: Parameter) -> list[torch.Tensor]:
    """The Hugging Face tensors of one of the policy's parameters, from a checkpoint."""
    boxes = [read(f"actor/weight/{box.name}") for box in parameter.boxes()]
    return parameter.cut.whole([torch.cat(boxes)])
