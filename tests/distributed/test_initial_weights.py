"""Random weights have the same bits in every layout, and a model takes exactly what its table names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

LAYOUTS = {"tp2": (2, 1), "pp2": (1, 2), "dp2": (1, 1)}
SEED = 11


def export_job(world: Any, tied: bool) -> tuple[dict[str, np.ndarray], dict[str, tuple[bool, int]]]:
    """Exported weights, and how Megatron will treat each parameter: (is split, bytes)."""
    from megarl.config.model_shape import ModelShape
    from megarl.models.hf_weights import random_weights
    from tests.distributed.builders import build_language_model

    shape = ModelShape(
        architecture="Qwen2ForCausalLM", vocab_size=33, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, max_positions=64, tied_embeddings=tied,
        qkv_bias=True, qk_norm=True, initializer_range=0.05,
    )  # fmt: skip
    model = build_language_model(world, shape, random_weights(SEED, shape.initializer_range))
    marks = {
        name: (bool(parameter.tensor_model_parallel), parameter.numel())
        for name, parameter in model.chunks[0].named_parameters()
    }
    names, tensors = [], []
    for bucket in model.export():
        names += [name for name, _ in bucket]
        tensors += [tensor.numpy().copy() for _, tensor in bucket]
    assert len(names) == len(set(names))
    assert sum(tensor.size for tensor in tensors) == shape.num_parameters
    return dict(zip(names, tensors, strict=True)), marks


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def whole(request: pytest.FixtureRequest, gang: Any) -> tuple[bool, dict[str, np.ndarray]]:
    ((weights, _),) = gang(1).run(export_job, tied=request.param)
    return request.param, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_from_the_same_bits(
    layout: str, whole: tuple[bool, dict[str, np.ndarray]], gang: Any
) -> None:
    tied, expected = whole
    tp_size, pp_size = LAYOUTS[layout]
    for weights, marks in gang(2).run(export_job, tp_size, pp_size, tied=tied):
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            assert np.array_equal(weights[name], tensor), name
        # A split parameter without its mark would be left out of the gradient norm by all ranks but the first.
        split = {name for name, (is_split, _) in marks.items() if is_split}
        assert split == {name for name in marks if "linear" in name or "embedding" in name or "output_layer" in name}


def test_random_weights_are_drawn_as_promised(whole: tuple[bool, dict[str, np.ndarray]]) -> None:
    _, weights = whole
    for name, tensor in weights.items():
        if name.endswith(".bias"):
            assert not tensor.any(), name
        elif tensor.ndim == 1:
            assert (tensor == 1).all(), name
        else:
            # at least 512 draws: the sample deviation is within 15 % (five standard errors)
            assert tensor.std() == pytest.approx(0.05, rel=0.15), name
            assert abs(tensor.mean()) < 0.05 * 5 / np.sqrt(tensor.size), name
    flat = torch.cat([torch.from_numpy(t).reshape(-1)[:100] for t in weights.values() if t.ndim == 2])
    assert len(flat.unique()) > 0.99 * len(flat), "tensors must not repeat each other"
