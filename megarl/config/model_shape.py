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
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LARGEST = 10**12  # beyond any model; also refuses NaN and infinity


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

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        query_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * query_width + 2 * kv_width)
        attention += (query_width + 2 * kv_width) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * layer + self.hidden_size


def shape_from_hf(config: Mapping[str, Any], where: str) -> ModelShape:
    """Read the shape; ``where`` names the file or config key in errors."""
    architecture = _architecture(config, where)
    _, qkv_bias, qk_norm = ARCHITECTURES[architecture]
    _refuse_unsupported(config, architecture, where)
    missing = [key for key in _REQUIRED if not _is_count(config.get(key))]
    if missing:
        raise ConfigError("MRL-1203", f"{where}: {', '.join(missing)} must be given, each as a whole number above 0.")
    heads = config["num_attention_heads"]
    shape = ModelShape(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=_count(config, "num_key_value_heads", heads, where),
        head_dim=_count(config, "head_dim", config["hidden_size"] // heads, where),
        rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6, where),
        rope_theta=_rope_theta(config, where),
        max_positions=_count(config, "max_position_embeddings", 2048, where),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        initializer_range=_positive(config, "initializer_range", 0.02, where),
    )
    _check_heads(shape, config, where)
    return shape


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a local Hugging Face model directory."""
    path = directory / "config.json"
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MissingInputError(
            "MRL-4001",
            f"model.path={str(directory)!a}: cannot read {path.name} in it ({reason}). "
            "Give a local Hugging Face directory.",
        ) from error
    try:
        config = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or nested beyond reason
        raise ConfigError("MRL-1204", f"{path}: not valid JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ConfigError("MRL-1204", f"{path}: must hold a JSON object.")
    return config


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures") or [f"(model_type {config.get('model_type')!r})"]
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            "MRL-1201",
            f"{where}: architecture {str(name)[:80]!a} is not supported. "
            f"Supported: architectures: [NAME] with {', '.join(ARCHITECTURES)}.",
        )
    return name


def _refuse_unsupported(config: Mapping[str, Any], architecture: str, where: str) -> None:
    for switch in _UNSUPPORTED_SWITCHES:
        if config.get(switch):
            raise ConfigError("MRL-1202", f"{where}: {switch}=true is not supported for {architecture}.")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError("MRL-1202", f"{where}: hidden_act={str(activation)[:80]!a} is not supported; only silu is.")


def _check_heads(shape: ModelShape, config: Mapping[str, Any], where: str) -> None:
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            "MRL-1206",
            f"{where}: num_attention_heads={shape.num_heads} is not a multiple of "
            f"num_key_value_heads={shape.num_kv_heads}.",
        )
    if not config.get("head_dim") and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            "MRL-1206",
            f"{where}: hidden_size={shape.hidden_size} is not a multiple of num_attention_heads={shape.num_heads}. "
            "Change one, or give head_dim.",
        )
    if shape.head_dim % 2:
        raise ConfigError("MRL-1206", f"{where}: head_dim={shape.head_dim} must be even for rotary embeddings.")


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    """transformers 5 writes ``rope_parameters``; older files have ``rope_theta`` and ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError("MRL-1205", f"{where}: rope_parameters must be a mapping.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            "MRL-1205", f"{where}: rope scaling {str(kind)[:80]!a} is not supported yet; only plain RoPE is."
        )
    return _positive(rope if "rope_theta" in rope else config, "rope_theta", 10000.0, where)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def _count(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not _is_count(value):
        raise ConfigError("MRL-1203", f"{where}: {key}={str(value)[:80]!a} must be a whole number above 0.")
    return int(value)


def _positive(config: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise ConfigError("MRL-1203", f"{where}: {key}={str(value)[:80]!a} must be a number above 0.")
    return float(value)
