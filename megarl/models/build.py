"""From the shape of a model to Megatron-Core modules: transformer config, layer spec, and which platform gets which."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.model_shape import ModelShape
from megarl.models.layout import Layout
from megarl.models.local_layers import PackedAttention, RMSNorm
from megarl.ops.rope import rope_frequencies


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is run, besides its shape and its layout."""

    dtype: torch.dtype = torch.float32
    # activations that the backward pass computes again
    recompute: Literal["none", "selective", "full"] = "none"
    # tokens whose logits exist at once; 0: all of a micro-batch
    logprob_chunk_tokens: int = 1024
    deterministic: bool = False
    # further fields of Megatron's TransformerConfig, as the user gave them
    megatron: Mapping[str, Any] = field(default_factory=dict)


def build_chunks(shape: ModelShape, layout: Layout, options: ModelOptions) -> list[GPTModel]:
    """This rank's parts of a decoder, one per model chunk. Weights are allocated, not initialised:
    `hf_weights.import_weights` fills them. The layout must be active.
    """
    config = transformer_config(shape, layout, options)
    frequencies, _ = rope_frequencies(shape)
    chunks = []
    for chunk in layout.local_chunks:
        vp_stage = chunk if len(layout.local_chunks) > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, layout, vp_stage),
            vocab_size=padded_vocab_size(shape, layout.world.tp.size),
            max_sequence_length=shape.max_positions,
            pre_process=layout.is_first(chunk),
            post_process=layout.is_last(chunk),
            share_embeddings_and_output_weights=shape.tied_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            parallel_output=True,
            vp_stage=vp_stage,
        )
        # Megatron knows one kind of scaling with fixed numbers; the frequencies are all there is to it.
        model.rotary_pos_emb.inv_freq = frequencies.to(layout.world.device)
        chunks.append(model.to(layout.world.device))
    return chunks


def padded_vocab_size(shape: ModelShape, tp_size: int) -> int:
    """The smallest multiple of ``tp_size``. Padding columns never reach a softmax (see `ops.logprobs`)."""
    return -(-shape.vocab_size // tp_size) * tp_size


def transformer_config(shape: ModelShape, layout: Layout, options: ModelOptions) -> TransformerConfig:
    """Megatron's record of the model and of how it is run."""
    world, parallel, dtype = layout.world, layout.parallel, options.dtype
    fields: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "layernorm_epsilon": shape.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "softmax_scale": _softmax_scale(shape),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": parallel.tp_size,
        "sequence_parallel": parallel.sequence_parallel,
        "pipeline_model_parallel_size": parallel.pp_size,
        "context_parallel_size": parallel.cp_size,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        # Micro-batches are packed, so every one has its own length (interleaved pipelines pad them to one).
        "variable_seq_lengths": parallel.vpp_size == 1,
        # Our losses carry their own global denominators; this keeps Megatron from dividing once more.
        # It must be set before DistributedDataParallel is built, which reads it in its constructor.
        "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",  # the default one refuses packed batches, experts or not
        "perform_initialization": False,
        "use_cpu_initialization": world.device.type == "cpu",
        "deterministic_mode": options.deterministic,
        **_pipeline(shape, layout),
        **_experts(shape, layout),
        **_recompute(options),
        **_kernel_choices(world.device),
        # Batched sends cannot tell a rank's two neighbours apart when they are the same, as in a ring of two stages.
        "batch_p2p_comm": world.device.type == "cuda" and parallel.vpp_size == 1,
        "overlap_p2p_comm": world.device.type == "cuda" and parallel.vpp_size > 1,
    }
    return TransformerConfig(**fields | dict(options.megatron))


def _softmax_scale(shape: ModelShape) -> float | None:
    """yarn multiplies cosines and sines by a factor; on queries and keys that is the factor's square on the scores."""
    _, factor = rope_frequencies(shape)
    return None if factor == 1.0 else factor**2 * shape.head_dim**-0.5


def _pipeline(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    parallel = layout.parallel
    if parallel.stage_layers is None:
        return {"virtual_pipeline_model_parallel_size": parallel.vpp_size if parallel.vpp_size > 1 else None}
    stages = [["decoder"] * count for count in parallel.layers_of_stages(shape.num_layers)]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return {"pipeline_model_parallel_layout": stages}


def _experts(shape: ModelShape, layout: Layout) -> dict[str, Any]:
    experts = shape.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.num_experts_per_token,
        "moe_ffn_hidden_size": experts.intermediate_size,
        "moe_layer_freq": [int(shape.is_sparse(layer)) for layer in range(shape.num_layers)],
        "moe_shared_expert_intermediate_size": experts.shared_intermediate_size or None,
        "moe_shared_expert_gate": experts.shared_intermediate_size > 0,
        # a softmax over the chosen experts' logits is a softmax over all, divided by the chosen ones' sum
        "moe_router_pre_softmax": not experts.normalize_top_k,
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": layout.world.device.type == "cuda",
        "expert_model_parallel_size": layout.parallel.ep_size,
        "expert_tensor_parallel_size": layout.parallel.expert_tp_size,
    }


def _recompute(options: ModelOptions) -> dict[str, Any]:
    if options.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective" if options.recompute == "selective" else None}


def _kernel_choices(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        "masked_softmax_fusion": on_cuda,
        "apply_rope_fusion": on_cuda,
        "persist_layer_norm": on_cuda,
        # Apex brings the kernel that accumulates weight gradients straight into the fp32 main gradient.
        "gradient_accumulation_fusion": on_cuda
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    }


def block_spec(config: TransformerConfig, layout: Layout, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Transformer Engine on CUDA; on CPU Megatron's local layers with our norm and our packed attention."""
    on_cuda = layout.world.device.type == "cuda"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=on_cuda, normalization="RMSNorm", vp_stage=vp_stage, pp_rank=layout.world.pp.rank
    )
    if on_cuda:
        return block
    for spec in block.layer_specs:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block
