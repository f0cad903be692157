"""The parameter table: every cut can be undone, and every Hugging Face tensor has exactly one place."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megarl
from megarl.config.model_shape import ModelShape


def load_by_path() -> ModuleType:
    """The module itself needs no Megatron; its package would import it, which takes eight seconds."""
    path = Path(megarl.__file__).parent / "models" / "parameter_table.py"
    spec = importlib.util.spec_from_file_location("parameter_table_alone", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


TABLE = load_by_path()


def shape_of(
    *, vocab_size: int = 11, kv_heads: int = 4, queries_per_group: int = 2, qkv_bias: bool = True,
    qk_norm: bool = True, tied: bool = False, num_layers: int = 4,
) -> ModelShape:  # fmt: skip
    return ModelShape(
        architecture="test", vocab_size=vocab_size, hidden_size=6, intermediate_size=8, num_layers=num_layers,
        num_heads=kv_heads * queries_per_group, num_kv_heads=kv_heads, head_dim=3, rms_norm_eps=1e-6, rope_theta=1e4,
        max_positions=64, tied_embeddings=tied, qkv_bias=qkv_bias, qk_norm=qk_norm, initializer_range=0.02,
    )  # fmt: skip


SHAPES = st.builds(
    shape_of,
    vocab_size=st.integers(1, 40),
    kv_heads=st.sampled_from([4, 8]),
    queries_per_group=st.integers(1, 3),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
    tied=st.booleans(),
)


def numbered(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """Tensors in which every element is different, and different from every other tensor's."""
    tensors, first = [], 1
    for shape in shapes:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + size, dtype=torch.float64).view(shape))
        first += size
    return tensors


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4]), st.booleans())
def test_local_and_whole_are_inverse(shape: ModelShape, tp_size: int, fused_norms: bool) -> None:
    for entry in TABLE.parameter_table(shape, 1, 0, fused_norms=fused_norms):
        whole = numbered(entry.hf_shapes)
        parts = [entry.cut.local(whole, rank, tp_size) for rank in range(tp_size)]
        again = entry.cut.whole(parts)
        assert [tensor.shape for tensor in again] == [tensor.shape for tensor in whole], entry.name
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, whole, strict=True)), entry.name
        assert len({part.shape for part in parts}) == 1, f"{entry.name}: ranks hold unequal parts"
        elements = torch.cat([part.reshape(-1) for part in parts])
        total = sum(tensor.numel() for tensor in whole)
        if entry.cut.split_dim is None:
            assert all(torch.equal(part, whole[0]) for part in parts)
        else:
            # every element is on exactly one rank; the rest is padding of zeros
            assert elements[elements != 0].sort().values.tolist() == list(range(1, total + 1)), entry.name
            joined = parts[0].size(entry.cut.split_dim) * tp_size
            rows = sum(tensor.size(entry.cut.split_dim) for tensor in whole)
            assert rows <= joined < rows + tp_size, f"{entry.name}: not split along its split_dim"


def test_queries_keys_and_values_lie_group_by_group() -> None:
    cut = TABLE.FusedQKV(num_groups=2, queries_per_group=2, head_dim=1)
    whole = [torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])]
    assert cut.local(whole, 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [cut.local(whole, rank, 2).tolist() for rank in range(2)] == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_gate_and_up_are_cut_apart() -> None:
    whole = [torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11], [12], [13]])]
    assert TABLE.GateUp().local(whole, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros_at_the_end() -> None:
    cut = TABLE.VocabRows(5)
    whole = [torch.arange(1, 6)[:, None]]
    parts = [cut.local(whole, rank, 4).flatten().tolist() for rank in range(4)]
    assert parts == [[1, 2], [3, 4], [5, 0], [0, 0]]


@pytest.mark.parametrize("pp_size", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_every_tensor_is_exported_once(tied: bool, pp_size: int) -> None:
    shape = shape_of(tied=tied)
    tables = [TABLE.parameter_table(shape, pp_size, stage, fused_norms=False) for stage in range(pp_size)]
    exported = [
        (name, size)
        for table in tables
        for entry in table
        if entry.exported
        for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
    ]
    assert max(Counter(name for name, _ in exported).values()) == 1
    assert sum(torch.Size(size).numel() for _, size in exported) == shape.num_parameters
    layers = {int(name.split(".")[2]) for name, _ in exported if name.startswith("model.layers.")}
    assert layers == set(range(shape.num_layers))
    assert ("lm_head.weight" in dict(exported)) == (not tied)
    for table in tables:
        assert max(Counter(entry.name for entry in table).values()) == 1
    # a tied embedding is needed by the last stage as well
    output = [entry for entry in tables[-1] if entry.name == "output_layer.weight"]
    assert len(output) == (0 if tied and pp_size == 1 else 1)


def test_names_of_transformer_engine() -> None:
    """Transformer Engine fuses each norm into the linear layer behind it, as ``layer_norm_weight``. This is what its
    source says; there is no GPU here to build such a model on."""
    names = [entry.name for entry in TABLE.parameter_table(shape_of(num_layers=1), 1, 0, fused_norms=True)]
    assert names == [
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]


def test_both_specs_hold_the_same_tensors() -> None:
    tables = [TABLE.parameter_table(shape_of(), 2, 1, fused_norms=fused) for fused in (False, True)]
    local, fused = ([(entry.hf_names, entry.hf_shapes) for entry in table] for table in tables)
    assert local == fused


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_a_value_model_ends_in_one_number(pp_size: int, tied: bool) -> None:
    shape = shape_of(tied=tied)
    tables = [TABLE.value_table(shape, pp_size, stage, fused_norms=False) for stage in range(pp_size)]
    heads = [entry for table in tables for entry in table if entry.name == "output_layer.weight"]
    assert [(head.hf_names, head.hf_shapes, head.cut.split_dim) for head in heads] == [
        (("value_head.weight",), ((1, shape.hidden_size),), None)
    ]
    assert heads[0] is tables[-1][-1]
