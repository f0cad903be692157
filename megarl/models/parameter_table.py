"""Which Hugging Face tensors live in which Megatron parameter, for every pipeline stage and both layer specs.

The tables are arithmetic on the model's shape alone, so every rank knows the parameters of every other without asking.
They cover the local layer spec and Transformer Engine's, which fuses a norm into the linear layer behind it and keeps
experts as numbered weights of one grouped layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.config.model_shape import ExpertShape, ModelShape
from megarl.models.cuts import FusedQKV, GateUp, InputColumns, Parameter, Replicated, VocabRows

VALUE_HEAD = "score.weight"
VALUE_BIAS = "score.bias"


@dataclass(frozen=True, slots=True)
class Naming:
    """What the names of a table depend on besides the model."""

    # Transformer Engine's layer spec, not the local one
    engine: bool = False
    # one output per token instead of a vocabulary
    value_head: bool = False
    ep_size: int = 1


def whole_table(shape: ModelShape, *, value_head: bool = False) -> list[Parameter]:
    """Every parameter of the model as if one rank had all of it."""
    return stage_tables(shape, [[range(shape.num_layers)]], Naming(value_head=value_head))[0]


def stage_tables(shape: ModelShape, chunk_layers: Sequence[Sequence[range]], naming: Naming) -> list[list[Parameter]]:
    """For every pipeline stage all its parameters, those of all expert-parallel ranks included.

    ``chunk_layers[stage][chunk]`` says which layers are where.
    """
    tables = []
    last = len(chunk_layers) - 1
    for stage, chunks in enumerate(chunk_layers):
        table: list[Parameter] = []
        for chunk, layers in enumerate(chunks):
            if stage == 0 and chunk == 0:
                table.append(_embedding(shape))
            for local_layer, layer in enumerate(layers):
                ours = f"decoder.layers.{local_layer}."
                table.extend(entry.on(chunk, ours) for entry in _layer(shape, layer, naming))
            if stage == last and chunk == len(chunks) - 1:
                tied_here = shape.tied_embeddings and stage == 0
                table.extend(entry.on(chunk) for entry in _output(shape, naming, tied_here=tied_here))
        tables.append(table)
    return tables


def has_value_bias(shape: ModelShape) -> bool:
    """Whether the value head of this kind of model adds a constant: token classifiers do."""
    return shape.architecture.endswith("ForTokenClassification")


def _embedding(shape: ModelShape) -> Parameter:
    return Parameter(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        ((shape.vocab_size, shape.hidden_size),),
        VocabRows(shape.vocab_size),
    )


def _output(shape: ModelShape, naming: Naming, *, tied_here: bool) -> Iterator[Parameter]:
    """What follows the last layer. ``tied_here``: the output layer is the embedding of this very stage."""
    yield _replicated("decoder.final_layernorm.weight", "model.norm.weight", shape.hidden_size)
    if naming.value_head:
        yield Parameter("output_layer.weight", (VALUE_HEAD,), ((1, shape.hidden_size),), Replicated())
        if has_value_bias(shape):
            yield _replicated("output_layer.bias", VALUE_BIAS, 1)
    elif not tied_here:
        name = "model.embed_tokens.weight" if shape.tied_embeddings else "lm_head.weight"
        yield Parameter(
            "output_layer.weight",
            (name,),
            ((shape.vocab_size, shape.hidden_size),),
            VocabRows(shape.vocab_size),
            exported=not shape.tied_embeddings,
        )


def _layer(shape: ModelShape, layer: int, naming: Naming) -> Iterator[Parameter]:
    theirs = f"model.layers.{layer}."
    sparse = shape.is_sparse(layer)
    fused_input = "self_attention.linear_qkv.layer_norm_weight"
    fused_mlp = "mlp.linear_fc1.layer_norm_weight"
    yield _replicated(
        fused_input if naming.engine else "input_layernorm.weight", f"{theirs}input_layernorm.weight", shape.hidden_size
    )
    yield from _attention(shape, f"{theirs}self_attn.")
    yield _replicated(
        # a router stands between the norm and the experts' linear layers, so nothing is fused there
        fused_mlp if naming.engine and not sparse else "pre_mlp_layernorm.weight",
        f"{theirs}post_attention_layernorm.weight",
        shape.hidden_size,
    )
    if sparse:
        assert shape.experts is not None
        yield from _experts(shape, shape.experts, f"{theirs}mlp.", naming)
    else:
        yield from _mlp(
            "mlp.linear_fc1.weight", "mlp.linear_fc2.weight", f"{theirs}mlp.", shape.intermediate_size, shape
        )


def _attention(shape: ModelShape, theirs: str) -> Iterator[Parameter]:
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    fused = FusedQKV(shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, shape.head_dim)
    rows = (queries, keys, keys)
    names = [f"{theirs}{x}_proj" for x in "qkv"]
    yield Parameter(
        "self_attention.linear_qkv.weight",
        tuple(f"{name}.weight" for name in names),
        tuple((n, shape.hidden_size) for n in rows),
        fused,
    )
    if shape.qkv_bias:
        biases = tuple(f"{name}.bias" for name in names)
        yield Parameter("self_attention.linear_qkv.bias", biases, tuple((n,) for n in rows), fused)
    if shape.qk_norm:
        yield _replicated("self_attention.q_layernorm.weight", f"{theirs}q_norm.weight", shape.head_dim)
        yield _replicated("self_attention.k_layernorm.weight", f"{theirs}k_norm.weight", shape.head_dim)
    projection = (f"{theirs}o_proj.weight",)
    yield Parameter("self_attention.linear_proj.weight", projection, ((shape.hidden_size, queries),), InputColumns())


def _experts(shape: ModelShape, experts: ExpertShape, theirs: str, naming: Naming) -> Iterator[Parameter]:
    router = ((experts.num_experts, shape.hidden_size),)
    yield Parameter("mlp.router.weight", (f"{theirs}gate.weight",), router, Replicated())
    per_rank = experts.num_experts // naming.ep_size
    for expert in range(experts.num_experts):
        ep_rank, local = divmod(expert, per_rank)
        if naming.engine:
            ours = [f"mlp.experts.linear_fc{i}.weight{local}" for i in (1, 2)]
        else:
            ours = [f"mlp.experts.local_experts.{local}.linear_fc{i}.weight" for i in (1, 2)]
        size = experts.intermediate_size
        yield from _mlp(ours[0], ours[1], f"{theirs}experts.{expert}.", size, shape, ep_rank)
    if experts.shared_intermediate_size:
        ours = [f"mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2)]
        yield from _mlp(ours[0], ours[1], f"{theirs}shared_expert.", experts.shared_intermediate_size, shape)
        gate = (f"{theirs}shared_expert_gate.weight",)
        yield Parameter("mlp.shared_experts.gate_weight", gate, ((1, shape.hidden_size),), Replicated())


def _mlp(
    fc1: str, fc2: str, theirs: str, size: int, shape: ModelShape, ep_rank: int | None = None
) -> Iterator[Parameter]:
    gate_up = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    inner = (size, shape.hidden_size)
    yield Parameter(fc1, gate_up, (inner, inner), GateUp(), ep_rank=ep_rank)
    yield Parameter(fc2, (f"{theirs}down_proj.weight",), (inner[::-1],), InputColumns(), ep_rank=ep_rank)


def _replicated(name: str, hf_name: str, size: int) -> Parameter:
    return Parameter(name, (hf_name,), ((size,),), Replicated())
