"""Megatron's random generators. No layer of ours draws from them; one that did would go on after a restart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

_PREFIX = "rng/megatron/"


def tracker_state() -> dict[str, torch.Tensor]:
    """The state of every generator that Megatron keeps."""
    return {_PREFIX + name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}


def restore_tracker_state(state: Mapping[str, torch.Tensor]) -> None:
    """Go on where `tracker_state` was taken."""
    kept = {name.removeprefix(_PREFIX): tensor for name, tensor in state.items() if name.startswith(_PREFIX)}
    get_cuda_rng_tracker().set_states(kept)
