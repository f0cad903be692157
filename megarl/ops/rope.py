"""Rotary position embeddings: how fast each pair of a head turns from one position to the next.

Plain torch on CPU, used alike by the trained model and by the embedded engine. The frequencies are those of
transformers bit for bit, so the order of the operations below is part of their meaning.
"""

from __future__ import annotations

import math

import torch

from megarl.config.model_shape import ModelShape, RopeScaling


def rope_frequencies(shape: ModelShape) -> tuple[torch.Tensor, float]:
    """Radians per position ``[head_dim / 2]`` in fp32, and the factor that multiplies both cosine and sine."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    # Radii are inverse frequencies; yarn scales them before it inverts.
    radii = shape.rope_theta**exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return 1.0 / radii, 1.0
    if scaling.kind == "linear":
        return 1.0 / radii / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(1.0 / radii, scaling), 1.0
    return _yarn(radii, shape, scaling), _yarn_attention_factor(scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Short waves stay, long waves are slowed down by the factor, those between are blended."""
    length, low, high = scaling.original_max_positions, scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / scaling.factor
    share = (length / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    not_long = torch.where(wavelengths < length / high, frequencies, blended)
    return torch.where(wavelengths > length / low, slowed, not_long)


def _yarn(radii: torch.Tensor, shape: ModelShape, scaling: RopeScaling) -> torch.Tensor:
    """Pairs that turn often within the original length stay, those that turn rarely are slowed down by the factor."""
    first = _pair_of_turns(scaling.beta_fast, shape, scaling)
    last = _pair_of_turns(scaling.beta_slow, shape, scaling)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, shape.head_dim - 1)
    if first == last:
        last += 0.001  # a step instead of a ramp; the division below must stay finite
    ramp = ((torch.arange(len(radii), dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * radii) * (1 - kept) + 1.0 / radii * kept


def _pair_of_turns(num_turns: float, shape: ModelShape, scaling: RopeScaling) -> float:
    """The index (a real number) of the pair that makes ``num_turns`` full turns over the original length."""
    positions_per_radian = scaling.original_max_positions / (num_turns * 2 * math.pi)
    return (shape.head_dim * math.log(positions_per_radian)) / (2 * math.log(shape.rope_theta))


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _attention_scale(scaling.factor, scaling.mscale) / _attention_scale(
            scaling.factor, scaling.mscale_all_dim
        )
    return _attention_scale(scaling.factor, 1.0)


def _attention_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
