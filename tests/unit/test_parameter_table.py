"""The parameter table: every cut can be undone, and every Hugging Face tensor has exactly one place."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.model_shape import ExpertShape, ModelShape
from megarl.core.slices import Box
from megarl.models.cuts import FusedQKV, GateUp, Parameter, VocabRows
from megarl.models.parameter_table import Naming, stage_tables, whole_table


def shape_of(
    *, vocab_size: int = 11, kv_heads: int = 4, queries_per_group: int = 2, qkv_bias: bool = True,
    qk_norm: bool = True, tied: bool = False, num_layers: int = 4, experts: ExpertShape | None = None,
    architecture: str = "test",
) -> ModelShape:  # fmt: skip
    return ModelShape(
        architecture=architecture, vocab_size=vocab_size, hidden_size=6, intermediate_size=8, num_layers=num_layers,
        num_heads=kv_heads * queries_per_group, num_kv_heads=kv_heads, head_dim=3, rms_norm_eps=1e-6, rope_theta=1e4,
        max_positions=64, tied_embeddings=tied, qkv_bias=qkv_bias, qk_norm=qk_norm, initializer_range=0.02,
        experts=experts,
    )  # fmt: skip


EXPERTS = st.builds(
    ExpertShape,
    num_experts=st.sampled_from([4, 8]),
    num_experts_per_token=st.just(2),
    intermediate_size=st.sampled_from([4, 12]),
    normalize_top_k=st.booleans(),
    shared_intermediate_size=st.sampled_from([0, 8]),
    dense_layers=st.sampled_from([frozenset(), frozenset({1})]),
)
SHAPES = st.builds(
    shape_of,
    vocab_size=st.integers(1, 40),
    kv_heads=st.sampled_from([4, 8]),
    queries_per_group=st.integers(1, 3),
    qkv_bias=st.booleans(),
    qk_norm=st.booleans(),
    tied=st.booleans(),
    experts=st.none() | EXPERTS,
)


def numbered(shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """Tensors in which every element is different, and different from every other tensor's."""
    tensors, first = [], 1
    for shape in shapes:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(first, first + size, dtype=torch.float64).view(shape))
        first += size
    return tensors


def local(entry: Parameter, whole: list[torch.Tensor], rank: int, size: int) -> torch.Tensor:
    """Rank ``rank``'s parameter, from the parts that it needs."""
    parts = [part.of(one) for part, one in zip(entry.cut.needed(entry.hf_shapes, rank, size), whole, strict=True)]
    rows = -(-sum(shape[0] for shape in entry.hf_shapes) // size) if entry.cut.split_dim == 0 else parts[0].size(0)
    return entry.cut.join(parts, rows)


def test_the_table_needs_no_megatron() -> None:
    code = "import sys, megarl.models.parameter_table; print('megatron.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4]))
def test_join_and_whole_are_inverse(shape: ModelShape, size: int) -> None:
    for entry in whole_table(shape):
        whole = numbered(entry.hf_shapes)
        parts = [local(entry, whole, rank, size) for rank in range(size)]
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
            joined = parts[0].size(entry.cut.split_dim) * size
            rows = sum(tensor.size(entry.cut.split_dim) for tensor in whole)
            assert rows <= joined < rows + size, f"{entry.name}: not split along its split_dim"


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]))
def test_boxes_mean_the_same_in_every_layout(shape: ModelShape, old: int, new: int) -> None:
    """What one number of ranks writes box by box, another reads: the parameters are those cut from the tensors."""
    for entry in whole_table(shape):
        whole = numbered(entry.hf_shapes)
        stored: dict[str, torch.Tensor] = {}
        for rank in range(old):
            memory, start = local(entry, whole, rank, old).reshape(-1), 0
            for box in entry.boxes(rank, old):
                place = stored.setdefault(box.name, torch.full(box.whole_shape, -1.0, dtype=torch.float64))
                place[window(box)] = memory[start : start + box.num_elements].view(box.shape)
                start += box.num_elements
            assert (memory[start:] == 0).all(), "only padding may be left"
        for rank in range(new):
            expected, start = local(entry, whole, rank, new).reshape(-1), 0
            for box in entry.boxes(rank, new):
                values = stored[box.name][window(box)].reshape(-1)
                assert torch.equal(values, expected[start : start + box.num_elements]), entry.name
                start += box.num_elements


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def test_queries_keys_and_values_lie_group_by_group() -> None:
    cut = FusedQKV(num_groups=2, queries_per_group=2, head_dim=1)
    entry = Parameter("qkv", ("q_proj", "k_proj", "v_proj"), ((4,), (2,), (2,)), cut)
    whole = [torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])]
    assert local(entry, whole, 0, 1).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert [local(entry, whole, rank, 2).tolist() for rank in range(2)] == [[0, 1, 10, 20], [2, 3, 11, 21]]


def test_gate_and_up_are_cut_apart() -> None:
    entry = Parameter("fc1", ("gate", "up"), ((4, 1), (4, 1)), GateUp())
    whole = [torch.tensor([[0], [1], [2], [3]]), torch.tensor([[10], [11], [12], [13]])]
    assert local(entry, whole, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_vocabulary_is_padded_with_zeros_at_the_end() -> None:
    entry = Parameter("embedding", ("embedding",), ((5, 1),), VocabRows(5))
    whole = [torch.arange(1, 6)[:, None]]
    assert [local(entry, whole, rank, 4).flatten().tolist() for rank in range(4)] == [[1, 2], [3, 4], [5, 0], [0, 0]]


# [stage][chunk]: whole, two stages, uneven stages, two stages with two chunks each
PIPELINES = {
    "one stage": [[range(4)]],
    "two stages": [[range(2)], [range(2, 4)]],
    "uneven stages": [[range(1)], [range(1, 4)]],
    "interleaved": [[range(1), range(2, 3)], [range(1, 2), range(3, 4)]],
}


@pytest.mark.parametrize("engine", [False, True], ids=["local", "transformer engine"])
@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ep_size", [1, 2])
@pytest.mark.parametrize("experts", [None, ExpertShape(4, 2, 4, True, 8, frozenset({1}))], ids=["dense", "experts"])
def test_every_tensor_is_exported_once(
    experts: ExpertShape | None, ep_size: int, tied: bool, pipeline: str, engine: bool
) -> None:
    shape = shape_of(tied=tied, experts=experts)
    tables = stage_tables(shape, PIPELINES[pipeline], Naming(engine=engine, ep_size=ep_size))
    exported = [
        (name, size)
        for table in tables
        for entry in table
        if entry.exported
        for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
    ]
    assert max(Counter(name for name, _ in exported).values()) == 1
    assert sum(torch.Size(size).numel() for _, size in exported) == shape.num_parameters
    assert dict(exported) == {
        name: size for entry in whole_table(shape) for name, size in zip(entry.hf_names, entry.hf_shapes, strict=True)
    }
    assert ("lm_head.weight" in dict(exported)) == (not tied)
    for table in tables:
        # on one rank every name occurs once
        for ep_rank in range(ep_size):
            names = Counter((e.chunk, e.name) for e in table if e.ep_rank in (None, ep_rank))
            assert max(names.values()) == 1
    # a tied embedding is needed by the last stage as well
    output = [entry for entry in tables[-1] if entry.name == "output_layer.weight"]
    assert len(output) == (0 if tied and len(tables) == 1 else 1)


def test_names_of_transformer_engine() -> None:
    """Transformer Engine fuses each norm into the linear layer behind it, as ``layer_norm_weight``, and keeps experts
    as numbered weights of one layer. This is what its source says; there is no GPU here to build such a model on."""
    experts = ExpertShape(4, 2, 4, True, 8, frozenset({0}))
    tables = stage_tables(shape_of(num_layers=2, experts=experts), [[range(2)]], Naming(engine=True, ep_size=2))
    names = [entry.name for entry in tables[0] if entry.ep_rank in (None, 1)]
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
        "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.1.self_attention.linear_qkv.weight",
        "decoder.layers.1.self_attention.linear_qkv.bias",
        "decoder.layers.1.self_attention.q_layernorm.weight",
        "decoder.layers.1.self_attention.k_layernorm.weight",
        "decoder.layers.1.self_attention.linear_proj.weight",
        "decoder.layers.1.pre_mlp_layernorm.weight",
        "decoder.layers.1.mlp.router.weight",
        "decoder.layers.1.mlp.experts.linear_fc1.weight0",
        "decoder.layers.1.mlp.experts.linear_fc2.weight0",
        "decoder.layers.1.mlp.experts.linear_fc1.weight1",
        "decoder.layers.1.mlp.experts.linear_fc2.weight1",
        "decoder.layers.1.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.1.mlp.shared_experts.linear_fc2.weight",
        "decoder.layers.1.mlp.shared_experts.gate_weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    ]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_value_model_ends_in_one_number(pipeline: str, tied: bool) -> None:
    shape = shape_of(tied=tied, architecture="LlamaForTokenClassification")
    tables = stage_tables(shape, PIPELINES[pipeline], Naming(value_head=True))
    heads = [entry for table in tables for entry in table if entry.name.startswith("output_layer.")]
    assert [(head.hf_names, head.hf_shapes, head.cut.split_dim) for head in heads] == [
        (("score.weight",), ((1, shape.hidden_size),), None),
        (("score.bias",), ((1,),), None),
    ]
    assert heads == tables[-1][-2:]
