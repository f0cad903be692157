"""Small random Hugging Face models of every supported family."""

from __future__ import annotations

from pathlib import Path

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

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(family: str, *, tied: bool, directory: Path, vocab_size: int = 99, seed: int = 0) -> PreTrainedModel:
    """A model with GQA and an odd vocabulary (it must be padded for two ranks), saved to ``directory``."""
    config_class, model_class = FAMILIES[family]
    config = config_class(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    with torch.no_grad():
        # norms and biases start at one and zero: perturb them, or a forgotten one would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model
