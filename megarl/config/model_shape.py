"""The shape of a decoder, read from a Hugging Face ``config.json`` without importing torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import ConfigError, MissingInputError

# architecture -> (family, qkv bias, per-head norm of queries and keys)
ARCHITECTURES: dict[str, tuple[str, bool, bool]] = {
    "LlamaForCausalLM": ("llama", False, False),
    "Qwen2ForCausalLM": ("qwen2", True, False),
    "Qwen3ForCausalLM": ("qwen3", False, True),
}
# What must be false, absent or "default" in a config.json that these decoders can represent.
_UNSUPPORTED_SWITCHES = ("attention_bias", "mlp_bias", "use_sliding_window")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that decides the parameters and the arithmetic of a dense decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    initializer_range: float


def shape_from_hf(config: Mapping[str, Any], where: str) -> ModelShape:
    """Read the shape; ``where`` names the file or config key in errors."""
    names = config.get("architectures") or [f"(model_type {config.get('model_type')!r})"]
    known = ARCHITECTURES.get(names[0])
    if known is None:
        raise ConfigError(
            "MRL-1201", f"{where}: architecture {names[0]} is not supported. Supported: {', '.join(ARCHITECTURES)}."
        )
    _, qkv_bias, qk_norm = known
    for switch in _UNSUPPORTED_SWITCHES:
        if config.get(switch):
            raise ConfigError("MRL-1202", f"{where}: {switch}=true is not supported for {names[0]}.")
    missing = [key for key in _REQUIRED if not isinstance(config.get(key), int) or config[key] < 1]
    if missing:
        raise ConfigError(
            "MRL-1203", f"{where}: {', '.join(missing)} must be given, each as a whole number above 0."
        )
    heads = config["num_attention_heads"]
    return ModelShape(
        architecture=names[0],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config, where),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        initializer_range=float(config.get("initializer_range", 0.02)),
    )


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a local Hugging Face model directory."""
    path = directory / "config.json"
    if not path.is_file():
        raise MissingInputError(
            "MRL-4001", f"model.path={str(directory)!r}: there is no {path.name} in it. Give a local Hugging Face directory."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError("MRL-1204", f"{path}: not valid JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ConfigError("MRL-1204", f"{path}: must hold a JSON object.")
    return config


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """transformers 5 writes ``rope_parameters``; older files have ``rope_theta`` and ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError("MRL-1205", f"{where}: rope scaling {kind!r} is not supported yet; only plain RoPE is.")
    return float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
