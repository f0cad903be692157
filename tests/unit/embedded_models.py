"""Tiny random models of every supported family, and an embedded engine that serves their weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megarl.config.model_shape import ModelShape, shape_from_hf
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine

VOCAB_SIZE = 101
# eager, as the attention: the way of transformers that is easiest to follow, for every dtype
_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "eager",
}  # fmt: skip
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {"head_dim": 16, "norm_topk_prob": True, **_EXPERTS}),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM, {"shared_expert_intermediate_size": 40, **_EXPERTS}),
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# Name -> (family, what differs from the plain model of the family). The original lengths are so short that positions
# of the tests' sequences fall on both sides of every bound.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope": {"rope_type": "linear", "factor": 2.5}}),
    "llama3": (
        "llama",
        {"rope": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, **_LLAMA3}},
    ),
    "yarn": ("llama", {"rope": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    "top-k not normalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "top-k normalized": ("qwen2_moe", {"norm_topk_prob": True}),
    "a dense layer among sparse ones": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "every other layer is sparse": ("qwen2_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "one expert for each token": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "every expert for each token": ("qwen2_moe", {"num_experts_per_tok": 6}),
}


def make_model(
    family: str, tied: bool = True, num_kv_heads: int = 2, rope: dict[str, Any] | None = None, **changes: Any
) -> PreTrainedModel:
    """Random weights, biases and norms included: a fresh model has zeros and ones there, which hide mistakes."""
    make_config, make, of_family = FAMILIES[family]
    settings = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": num_kv_heads, "head_dim": 8, "max_position_embeddings": 256,
        "tie_word_embeddings": tied, "rope_parameters": {"rope_type": "default", **(rope or {}), "rope_theta": 1000.0},
        "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "attn_implementation": "eager",
        "architectures": [make.__name__],
    }  # fmt: skip
    model: PreTrainedModel = make(make_config(**(settings | of_family | changes))).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            # 0.2 spreads next-token probabilities over three orders of magnitude, and fp32 (this engine's and that of
            # transformers alike) stays within 6e-6 of float64; at 0.3 both are further away.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + centre)
    return model


def make_variant(name: str) -> PreTrainedModel:
    family, changes = VARIANTS[name]
    return make_model(family, **changes)


def shape_of(model: PreTrainedModel) -> ModelShape:
    return shape_from_hf(model.config.to_dict(), "config.json")


def parameters_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """What the weight push sends: names as on disk, tied embeddings once. Changes in place change the model."""
    return [item for name, tensor in model.named_parameters() for item in _as_on_disk(name, tensor)]


def _as_on_disk(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers holds the experts of a layer in two tensors; its files hold three matrices for each expert."""
    stacked = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if stacked is None:
        yield name, tensor
        return
    parts = ("gate", "up") if stacked[2] == "gate_up_proj" else ("down",)
    for expert, matrix in enumerate(tensor):
        for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True):
            yield f"{stacked[1]}.{expert}.{part}_proj.weight", piece


def load(engine: EmbeddedEngine, model: PreTrainedModel, version: int = 1) -> None:
    engine.begin_weight_update()
    engine.update_weights(parameters_of(model))
    engine.end_weight_update(version)


def make_engine(
    model: PreTrainedModel, num_slots: int = 4, max_sequence_length: int = 96, dtype: torch.dtype = torch.float32
) -> EmbeddedEngine:
    engine = EmbeddedEngine(shape_of(model), num_slots, max_sequence_length, dtype=dtype)
    load(engine, model)
    return engine


def make_requests(count: int, params: SamplingParams, max_prompt: int = 20, seed: int = 0) -> list[GenerationRequest]:
    """Prompts of mixed length."""
    random = np.random.default_rng(seed)
    return [
        GenerationRequest(
            f"r{index}", random.integers(2, VOCAB_SIZE, random.integers(1, max_prompt + 1)), 1000 + index, params
        )
        for index in range(count)
    ]


def hf_logprobs(model: PreTrainedModel, prompt: np.ndarray, response: np.ndarray, temperature: float) -> torch.Tensor:
    """The log-prob of each response token, from one forward of transformers over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, response]))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
