"""The shape of a decoder, read from a Hugging Face ``config.json`` without importing torch or transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config.families import POLICY_HEADS, VALUE_HEADS, Family, family_of, supported
from megarl.config.hf_numbers import count, is_count, positive, switch
from megarl.config.rope import RopeScaling, read_rope
from megarl.core.errors import ConfigError, MissingInputError

__all__ = ["ExpertShape", "ModelShape", "RopeScaling", "read_hf_config", "shape_from_hf", "value_shape_from_hf"]

# What must be false or absent in a config.json that these decoders can represent.
_UNSUPPORTED_SWITCHES = ("attention_bias", "mlp_bias", "use_sliding_window")
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_MOST_LAYERS = 10_000
# transformers' number of outputs of a classification head that does not say how many it has
_DEFAULT_LABELS = 2


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The mixture of experts of a sparse layer."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    # the chosen experts' probabilities are divided by their sum
    normalize_top_k: bool
    # one more expert that sees every token, behind a sigmoid gate (Qwen2-MoE); 0: none
    shared_intermediate_size: int = 0
    # layers that have a plain MLP instead
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything that decides the parameters and the arithmetic of a decoder."""

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
    rope_scaling: RopeScaling | None = None
    experts: ExpertShape | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether layer ``layer`` (from 0) has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    @property
    def num_sparse_layers(self) -> int:
        """Layers with experts."""
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def num_parameters(self) -> int:
        """Weights of the whole model; tied embeddings count once."""
        layers = self.num_layers * self.attention_parameters
        layers += (self.num_layers - self.num_sparse_layers) * self.dense_parameters
        layers += self.num_sparse_layers * (self.expert_parameters + self.routing_parameters)
        return self.vocab_size * self.hidden_size + layers + self.hidden_size + self.head_parameters

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer outside its MLP: attention and both norms."""
        query_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        biases = (query_width + 2 * kv_width) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        return self.hidden_size * (2 * query_width + 2 * kv_width) + biases + 2 * self.hidden_size

    @property
    def dense_parameters(self) -> int:
        """Weights of the MLP of a layer without experts."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_parameters(self) -> int:
        """Weights of all the experts of a sparse layer, the shared one apart."""
        return 0 if self.experts is None else 3 * self.hidden_size * self.experts.intermediate_size * self._num_experts

    @property
    def routing_parameters(self) -> int:
        """Weights of a sparse layer's router and shared expert, with its gate."""
        if self.experts is None:
            return 0
        shared = self.experts.shared_intermediate_size
        return self.hidden_size * (self._num_experts + 3 * shared + (shared > 0))

    @property
    def head_parameters(self) -> int:
        """Weights behind the last norm: none of their own if they are the embedding's; one column for a value."""
        if self.architecture.endswith(VALUE_HEADS):
            return self.hidden_size + self.architecture.endswith("ForTokenClassification")  # this one has a bias
        return 0 if self.tied_embeddings else self.vocab_size * self.hidden_size

    @property
    def _num_experts(self) -> int:
        return 0 if self.experts is None else self.experts.num_experts


def shape_from_hf(config: Mapping[str, Any], where: str) -> ModelShape:
    """The shape of a policy; ``where`` names the file or config key in errors."""
    return _read(config, POLICY_HEADS, where)


def value_shape_from_hf(config: Mapping[str, Any], where: str, heads: tuple[str, ...] = VALUE_HEADS) -> ModelShape:
    """The shape of a value or reward model: a classification model with a single output, and one of these heads."""
    shape = _read(config, heads, where)
    labels = config.get("id2label")
    num_labels = len(labels) if isinstance(labels, Mapping) and labels else config.get("num_labels", _DEFAULT_LABELS)
    if num_labels != 1:
        raise ConfigError(
            "MRL-1207",
            f"{where}: {shape.architecture} has {str(num_labels)[:80]} outputs (id2label, num_labels); "
            "a value or reward model has 1.",
        )
    return shape


def read_hf_config(directory: Path, key: str = "model.path") -> dict[str, Any]:
    """The ``config.json`` of a local Hugging Face model directory, which the setting ``key`` names."""
    path = directory / "config.json"
    try:
        raw = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise MissingInputError(
            "MRL-4001",
            f"{key}={str(directory)!a}: cannot read {path.name} in it ({reason}). Give a local Hugging Face directory.",
        ) from error
    try:
        config = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or nested beyond reason
        raise ConfigError("MRL-1204", f"{path}: not valid JSON ({error}).") from error
    if not isinstance(config, dict):
        raise ConfigError("MRL-1204", f"{path}: must hold a JSON object.")
    return config


def _read(config: Mapping[str, Any], heads: tuple[str, ...], where: str) -> ModelShape:
    architecture, family = _architecture(config, heads, where)
    missing = [key for key in _REQUIRED if not is_count(config.get(key))]
    if missing:
        raise ConfigError("MRL-1203", f"{where}: {', '.join(missing)} must be given, each as a whole number above 0.")
    if config["num_hidden_layers"] > _MOST_LAYERS:
        raise ConfigError("MRL-1203", f"{where}: num_hidden_layers must be at most {_MOST_LAYERS}.")
    max_positions = count(config, "max_position_embeddings", family.max_positions, where)
    _refuse_unsupported(config, architecture, where)
    _refuse_windows(config, family, max_positions, where)
    num_heads = config["num_attention_heads"]
    rope_theta, rope_scaling = read_rope(config, max_positions, where)
    shape = ModelShape(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=_kv_heads(config, family, where),
        head_dim=count(config, "head_dim", family.head_dim or config["hidden_size"] // num_heads, where),
        rms_norm_eps=positive(config, "rms_norm_eps", 1e-6, where),
        rope_theta=rope_theta,
        max_positions=max_positions,
        tied_embeddings=switch(config, "tie_word_embeddings", False, where),
        qkv_bias=switch(config, "qkv_bias", True, where) if family.name == "qwen2_moe" else family.qkv_bias,
        qk_norm=family.qk_norm,
        initializer_range=positive(config, "initializer_range", 0.02, where),
        rope_scaling=rope_scaling,
        experts=_experts(config, family, where),
    )
    _check_heads(shape, config, family, where)
    return shape


def _architecture(config: Mapping[str, Any], heads: tuple[str, ...], where: str) -> tuple[str, Family]:
    names = config.get("architectures") or [f"(model_type {config.get('model_type')!r})"]
    name = names[0] if isinstance(names, list) else names
    family = family_of(name, heads) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            "MRL-1201",
            f"{where}: architecture {str(name)[:80]!a} is not supported. "
            f"Supported: architectures: [NAME] with {', '.join(supported(heads))}.",
        )
    return str(name), family


def _refuse_unsupported(config: Mapping[str, Any], architecture: str, where: str) -> None:
    for key in _UNSUPPORTED_SWITCHES:
        if config.get(key):
            raise ConfigError("MRL-1202", f"{where}: {key}=true is not supported for {architecture}.")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError("MRL-1202", f"{where}: hidden_act={str(activation)[:80]!a} is not supported; only silu is.")


def _refuse_windows(config: Mapping[str, Any], family: Family, max_positions: int, where: str) -> None:
    """Every token must see all that came before it. A window as long as the model's longest text hides nothing."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise ConfigError("MRL-1202", f"{where}: layer_types may only be full_attention.")
    window = config.get("sliding_window", family.sliding_window) if family.sliding_window else None
    if window is not None and not (is_count(window) and window >= max_positions):
        raise ConfigError(
            "MRL-1202",
            f"{where}: sliding_window={str(window)[:80]} is shorter than max_position_embeddings={max_positions}; "
            "sliding windows are not supported. Set sliding_window: null if the model was trained without one, "
            f"or lower max_position_embeddings to {window if is_count(window) else 'it'}.",
        )


def _kv_heads(config: Mapping[str, Any], family: Family, where: str) -> int:
    """A key that is absent means the family's number; null means as many as there are heads."""
    num_heads: int = config["num_attention_heads"]
    absent = family.kv_heads or num_heads
    return count(config, "num_key_value_heads", num_heads if "num_key_value_heads" in config else absent, where)


def _experts(config: Mapping[str, Any], family: Family, where: str) -> ExpertShape | None:
    if family.experts is None:
        return None
    absent = family.experts
    dense = _dense_layers(config, where)
    if len(dense) == config["num_hidden_layers"]:
        return None
    # transformers 5 writes the number under another name than it is documented under
    num_experts_key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    shared = 0
    if absent.shared_intermediate_size:
        shared = count(config, "shared_expert_intermediate_size", absent.shared_intermediate_size, where)
    experts = ExpertShape(
        num_experts=count(config, num_experts_key, absent.num_experts, where),
        num_experts_per_token=count(config, "num_experts_per_tok", absent.num_experts_per_token, where),
        intermediate_size=count(config, "moe_intermediate_size", absent.intermediate_size, where),
        normalize_top_k=switch(config, "norm_topk_prob", False, where),
        shared_intermediate_size=shared,
        dense_layers=dense,
    )
    if experts.num_experts_per_token > experts.num_experts:
        raise ConfigError(
            "MRL-1203",
            f"{where}: num_experts_per_tok={experts.num_experts_per_token} is more than "
            f"{num_experts_key}={experts.num_experts}.",
        )
    if experts.num_experts_per_token == 1 and experts.normalize_top_k:
        raise ConfigError(
            "MRL-1202",
            f"{where}: norm_topk_prob=true with num_experts_per_tok=1 is not supported: "
            "every expert would count 1, and the router would learn nothing. Set norm_topk_prob: false.",
        )
    return experts


def _dense_layers(config: Mapping[str, Any], where: str) -> frozenset[int]:
    """Layers (from 0) that are named, and all but every ``decoder_sparse_step``-th."""
    every = count(config, "decoder_sparse_step", 1, where)
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise ConfigError("MRL-1203", f"{where}: mlp_only_layers must be a list of layer numbers, from 0.")
    return frozenset(layer for layer in range(config["num_hidden_layers"]) if layer in named or (layer + 1) % every)


def _check_heads(shape: ModelShape, config: Mapping[str, Any], family: Family, where: str) -> None:
    if shape.num_heads % shape.num_kv_heads:
        assumed = "" if "num_key_value_heads" in config else f", which {shape.architecture} has where none are given"
        raise ConfigError(
            "MRL-1206",
            f"{where}: num_attention_heads={shape.num_heads} is not a multiple of "
            f"num_key_value_heads={shape.num_kv_heads}{assumed}.",
        )
    if not (config.get("head_dim") or family.head_dim) and shape.hidden_size % shape.num_heads:
        raise ConfigError(
            "MRL-1206",
            f"{where}: hidden_size={shape.hidden_size} is not a multiple of num_attention_heads={shape.num_heads}. "
            "Change one, or give head_dim.",
        )
    if shape.head_dim % 2:
        raise ConfigError("MRL-1206", f"{where}: head_dim={shape.head_dim} must be even for rotary embeddings.")
