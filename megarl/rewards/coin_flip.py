"""A reward without information: the control that no training may pass."""

from __future__ import annotations

from megarl.core.sample import Prompt, Sample
from megarl.core.seeding import derive_seed


def coin_flip(prompt: Prompt, sample: Sample) -> float:  # noqa: ARG001 - every reward is called with a prompt
    """0 or 1, decided by the sample's seed alone."""
    return float(derive_seed("coin flip", sample.seed) % 2)
