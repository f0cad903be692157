"""Small random Hugging Face models of every supported family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# family -> (name of its classes in transformers, what its config needs besides the usual)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
    ),
}
DENSE = ("llama", "mistral", "qwen2", "qwen3")


def tiny_model(
    family: str,
    *,
    directory: Path,
    tied: bool = False,
    vocab_size: int = 99,
    seed: int = 0,
    head: str = "ForCausalLM",
    **changes: Any,
) -> PreTrainedModel:
    """A model with GQA and an odd vocabulary (it must be padded for two ranks), saved to ``directory``."""
    prefix, extra = FAMILIES[family]
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "attn_implementation": "eager",
        **extra,
        **changes,
    }
    config = getattr(transformers, f"{prefix}Config")(**settings)
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, prefix + head)(config).eval()
    with torch.no_grad():
        # norms and biases start at one and zero: perturb them, or a forgotten one would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    return model
