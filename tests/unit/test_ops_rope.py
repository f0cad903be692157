"""Rotary frequencies are those of transformers, to the last bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megarl.config.model_shape import ModelShape, RopeScaling
from megarl.ops.rope import rope_frequencies

PLAIN = ModelShape(
    architecture="LlamaForCausalLM", vocab_size=100, hidden_size=256, intermediate_size=64, num_layers=1, num_heads=4,
    num_kv_heads=4, head_dim=64, rms_norm_eps=1e-6, rope_theta=10000.0, max_positions=8192, tied_embeddings=True,
    qkv_bias=False, qk_norm=False, initializer_range=0.02,
)  # fmt: skip
# What these fields are called in a config.json.
HF_NAMES = {"kind": "rope_type", "original_max_positions": "original_max_position_embeddings"}
FIELDS_OF_KIND = {
    "linear": {"kind", "factor"},
    "llama3": {"kind", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor"},
    "yarn": {f.name for f in dataclasses.fields(RopeScaling)} - {"low_freq_factor", "high_freq_factor"},
}


def expected(shape: ModelShape) -> tuple[torch.Tensor, float]:
    """What transformers computes for this shape."""
    rope: dict[str, Any] = {"rope_type": "default"}
    scaling = shape.rope_scaling
    if scaling is not None:
        rope = {HF_NAMES.get(name, name): getattr(scaling, name) for name in FIELDS_OF_KIND[scaling.kind]}
    config = LlamaConfig(
        head_dim=shape.head_dim, max_position_embeddings=shape.max_positions,
        rope_parameters={**rope, "rope_theta": shape.rope_theta},
    )  # fmt: skip
    compute = LlamaRotaryEmbedding.compute_default_rope_parameters
    if scaling is not None:
        compute = ROPE_INIT_FUNCTIONS[scaling.kind]
    return compute(config, "cpu")


def assert_equal_bits(shape: ModelShape) -> None:
    frequencies, attention_scaling = rope_frequencies(shape)
    expected_frequencies, expected_scaling = expected(shape)
    assert frequencies.dtype == torch.float32
    assert frequencies.view(torch.int32).tolist() == expected_frequencies.view(torch.int32).tolist()
    assert attention_scaling == expected_scaling


SCALINGS = {
    "plain": None,
    "linear": RopeScaling("linear", 2.0, 8192),
    "llama 3.1": RopeScaling("llama3", 8.0, 8192),
    "llama 3.2": RopeScaling("llama3", 32.0, 8192, 1.0, 4.0),
    "llama3, a narrow band of short waves": RopeScaling("llama3", 3.0, 128, 2.0, 2.5),
    "yarn as for qwen": RopeScaling("yarn", 4.0, 2048),
    "yarn, both mscales": RopeScaling("yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=0.707),
    "yarn, one mscale is none": RopeScaling("yarn", 40.0, 4096, mscale=0.707),
    "yarn, a given attention factor": RopeScaling("yarn", 16.0, 512, attention_factor=1.25, mscale=2.0),
    "yarn, real bounds": RopeScaling("yarn", 32.0, 4096, truncate=False),
    "yarn, other betas": RopeScaling("yarn", 8.0, 4096, beta_fast=64.0, beta_slow=2.0),
    "yarn, a step instead of a ramp": RopeScaling("yarn", 8.0, 2048, beta_fast=4.0, beta_slow=4.0, truncate=False),
    "yarn, bounds beyond the head": RopeScaling("yarn", 2.0, 4, beta_fast=32.0, beta_slow=1e-9),
    "yarn, factor 1": RopeScaling("yarn", 1.0, 8192),
}


@pytest.mark.parametrize("head_dim", [2, 8, 64, 96, 128])
@pytest.mark.parametrize("rope_theta", [10000.0, 500000.0, 1e6])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str, rope_theta: float, head_dim: int) -> None:
    assert_equal_bits(dataclasses.replace(PLAIN, rope_scaling=SCALINGS[name], rope_theta=rope_theta, head_dim=head_dim))


@given(
    scaling=st.builds(
        RopeScaling,
        kind=st.sampled_from(["linear", "llama3", "yarn"]),
        factor=st.floats(1, 64),
        original_max_positions=st.integers(16, 100_000),
        low_freq_factor=st.floats(0.5, 3),
        high_freq_factor=st.floats(3.5, 16),
        beta_fast=st.floats(8, 64),
        beta_slow=st.floats(0.5, 4),
        attention_factor=st.none() | st.floats(0.5, 2),
        mscale=st.none() | st.floats(0.1, 2),
        mscale_all_dim=st.none() | st.floats(0.1, 2),
        truncate=st.booleans(),
    ),
    rope_theta=st.floats(100, 1e7),
    head_dim=st.integers(1, 64).map(lambda half: 2 * half),
)
@settings(max_examples=150, deadline=None)
def test_any_numbers_give_the_bits_of_transformers(scaling: RopeScaling, rope_theta: float, head_dim: int) -> None:
    assert_equal_bits(dataclasses.replace(PLAIN, rope_scaling=scaling, rope_theta=rope_theta, head_dim=head_dim))


def test_scalings_differ() -> None:
    """The control of the tests above: no scaling is silently the plain one."""
    shapes = [dataclasses.replace(PLAIN, rope_scaling=scaling) for scaling in SCALINGS.values()]
    seen = {(tuple(frequencies.tolist()), scale) for frequencies, scale in map(rope_frequencies, shapes)}
    assert len(seen) == len(SCALINGS) - 1  # yarn with factor 1 is plain
