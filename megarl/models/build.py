"""From the shape of a model to a Megatron-Core model: transformer config, layer spec, and which platform gets which."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config.model_shape import ModelShape
from megarl.core.device import training_dtype
from megarl.core.world import World
from megarl.models.local_layers import PackedAttention, RMSNorm


def build_gpt(shape: ModelShape, world: World) -> GPTModel:
    """This rank's part of a decoder. Weights are allocated, not initialised: `hf_weights.import_weights` fills them."""
    config = transformer_config(shape, world)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(shape, config, world),
        vocab_size=padded_vocab_size(shape, world.tp.size),
        max_sequence_length=shape.max_positions,
        pre_process=world.pp.rank == 0,
        post_process=world.is_last_stage,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        parallel_output=True,
    )
    return model.to(world.device)


def padded_vocab_size(shape: ModelShape, tp_size: int) -> int:
    """The smallest multiple of ``tp_size``. Padding columns never reach a softmax (see `ops.logprobs`)."""
    return -(-shape.vocab_size // tp_size) * tp_size


def valid_vocab_columns(shape: ModelShape, world: World) -> int:
    """How many of this rank's logit columns are real."""
    width = padded_vocab_size(shape, world.tp.size) // world.tp.size
    return max(0, min(width, shape.vocab_size - world.tp.rank * width))


def transformer_config(shape: ModelShape, world: World) -> TransformerConfig:
    """Megatron's record of the model and of how it is run."""
    dtype = training_dtype(world.device)
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=world.tp.size,
        pipeline_model_parallel_size=world.pp.size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Micro-batches are packed, so every one has its own length.
        variable_seq_lengths=True,
        # Our losses carry their own global denominators; this keeps Megatron from dividing once more.
        # It must be set before DistributedDataParallel is built, which reads it in its constructor.
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # the default one refuses packed batches, experts or not
        perform_initialization=False,
        use_cpu_initialization=world.device.type == "cpu",
        **_kernel_choices(world.device),
    )


def _kernel_choices(device: torch.device) -> dict[str, Any]:
    on_cuda = device.type == "cuda"
    return {
        "bias_activation_fusion": on_cuda,
        "bias_dropout_fusion": on_cuda,
        "masked_softmax_fusion": on_cuda,
        "apply_rope_fusion": on_cuda,
        "persist_layer_norm": on_cuda,
        "batch_p2p_comm": on_cuda,
        # Apex brings the kernel that accumulates weight gradients straight into the fp32 main gradient.
        "gradient_accumulation_fusion": on_cuda
        and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
    }


def layer_spec(shape: ModelShape, config: TransformerConfig, world: World) -> Any:
    """Transformer Engine on CUDA; on CPU Megatron's local layers with our norm and our packed attention."""
    if world.device.type == "cuda":
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # Given as a block, so that the norm after the last layer is replaced too.
    num_local_layers = config.num_layers // world.pp.size
    return TransformerBlockSubmodules(layer_specs=[_copy(spec)] * num_local_layers, layer_norm=RMSNorm)


def _copy(spec: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(module=spec.module, params=spec.params, submodules=spec.submodules)
