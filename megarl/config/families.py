"""The model families that megarl trains, and what transformers assumes where a ``config.json`` is silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """What the models of one family have in common. ``None`` for heads: derived from the other numbers.

    ``sliding_window`` is the window where the file names none; 0 if it only counts with ``use_sliding_window``.
    """

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int = 32768
    sliding_window: int = 0
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class Experts:
    """What a family of mixtures of experts assumes."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int


# by the name of the architecture without its head
FAMILIES: dict[str, Family] = {
    "Llama": Family("llama", max_positions=2048),
    "Mistral": Family("mistral", kv_heads=8, max_positions=131072, sliding_window=4096),
    "Qwen2": Family("qwen2", qkv_bias=True, kv_heads=32),
    "Qwen3": Family("qwen3", qk_norm=True, kv_heads=32, head_dim=128),
    "Qwen2Moe": Family("qwen2_moe", qkv_bias=True, kv_heads=16, experts=Experts(60, 4, 1408, 5632)),
    "Qwen3Moe": Family("qwen3_moe", qk_norm=True, kv_heads=4, experts=Experts(128, 8, 768, 0)),
}
POLICY_HEADS = ("ForCausalLM",)
REWARD_HEADS = ("ForSequenceClassification",)
VALUE_HEADS = (*REWARD_HEADS, "ForTokenClassification")


def family_of(architecture: str, heads: tuple[str, ...]) -> Family | None:
    """The family of an architecture with one of the heads; None if it is not supported."""
    return next((FAMILIES.get(architecture.removesuffix(head)) for head in heads if architecture.endswith(head)), None)


def supported(heads: tuple[str, ...]) -> list[str]:
    """The names of all architectures with these heads."""
    return [f"{family}{head}" for head in heads for family in FAMILIES]
