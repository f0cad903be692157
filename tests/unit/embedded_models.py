"""Tiny random models of every supported family, and an embedded engine that serves their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megarl.config.model_shape import ModelShape, shape_from_hf
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine

VOCAB_SIZE = 101
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(family: str, tied: bool = True, num_kv_heads: int = 2) -> PreTrainedModel:
    """Random weights, biases and norms included: a fresh model has zeros and ones there, which hide mistakes."""
    make_config, make = FAMILIES[family]
    config = make_config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=num_kv_heads, head_dim=8 if family != "qwen3" else 16, max_position_embeddings=256,
        tie_word_embeddings=tied, rope_theta=1000.0, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        attn_implementation="eager", architectures=[make.__name__],
    )  # fmt: skip
    model = make(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            # 0.2 spreads next-token probabilities over three orders of magnitude, and fp32 (this engine's and that of
            # transformers alike) stays within 3e-6 of float64; at 0.3 both are up to 8e-6 away.
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + centre)
    return model


def shape_of(model: PreTrainedModel) -> ModelShape:
    return shape_from_hf(model.config.to_dict(), "config.json")


def parameters_of(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """What the weight push sends: tied embeddings once."""
    return list(model.named_parameters())


def load(engine: EmbeddedEngine, model: PreTrainedModel, version: int = 1) -> None:
    engine.begin_weight_update()
    engine.update_weights(parameters_of(model))
    engine.end_weight_update(version)


def make_engine(model: PreTrainedModel, num_slots: int = 4, max_sequence_length: int = 96) -> EmbeddedEngine:
    engine = EmbeddedEngine(shape_of(model), num_slots, max_sequence_length)
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
        logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, ids[len(prompt) :, None])[:, 0]
