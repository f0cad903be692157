"""The state of this process's random generators as tensors, for a checkpoint.

Every draw that matters is seeded from what it is for (`core.seeding`). These generators are saved for the code that is
not ours: a user's reward, for example.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of torch, numpy and Python."""
    _, words, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    state = {
        "rng/torch": torch.get_rng_state(),
        "rng/numpy": torch.tensor([*map(int, words), int(position), int(has_gauss)], dtype=torch.int64),
        "rng/numpy_gauss": torch.tensor([float(gauss)], dtype=torch.float64),
        "rng/python": torch.tensor([version, *internal], dtype=torch.int64),
        "rng/python_gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
    }
    if device.type == "cuda":
        state["rng/cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng_state(state: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on where `rng_state` was taken. Saving and restoring draw nothing."""
    torch.set_rng_state(state["rng/torch"])
    *words, position, has_gauss = state["rng/numpy"].tolist()
    gauss = float(state["rng/numpy_gauss"])
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, gauss))
    version, *internal = state["rng/python"].tolist()
    next_gauss = state["rng/python_gauss"].tolist()
    random.setstate((version, tuple(internal), next_gauss[0] if next_gauss else None))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["rng/cuda"], device)
