"""Rotary embeddings as a ``config.json`` describes them: transformers 5 writes ``rope_parameters``, older versions
``rope_theta`` and ``rope_scaling``. Defaults and precedence are those of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from megarl.config.hf_numbers import count, positive, switch
from megarl.core.errors import ConfigError

_DEFAULT_THETA = 10000.0
_SCALED = ("linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model that was trained on short texts reads long ones. The numbers mean what transformers means by them.

    ``low_freq_factor`` and ``high_freq_factor`` belong to llama3; the betas, ``attention_factor`` (None: from
    ``factor``), the mscales and ``truncate`` to yarn.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(config: Mapping[str, Any], max_positions: int, where: str) -> tuple[float, RopeScaling | None]:
    """The base of the wavelengths, and how they are scaled."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise ConfigError("MRL-1205", f"{where}: rope_parameters must be one mapping for all layers.")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *_SCALED):
        raise ConfigError(
            "MRL-1205",
            f"{where}: rope scaling {str(kind)[:80]!a} is not supported. Supported: default, {', '.join(_SCALED)}.",
        )
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise ConfigError(
            "MRL-1205",
            f"{where}: partial_rotary_factor={str(share)[:80]!a} is not supported: whole heads are rotated.",
        )
    theta = positive(rope if "rope_theta" in rope else config, "rope_theta", _DEFAULT_THETA, where)
    return theta, None if kind == "default" else _scaling(kind, rope, config, max_positions, where)


def _scaling(
    kind: str, rope: Mapping[str, Any], config: Mapping[str, Any], max_positions: int, where: str
) -> RopeScaling:
    where = f"{where}: rope scaling {kind}"
    _require(rope, ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",), where)
    # A value beside the rope's own wins, because transformers copies it over.
    original = count(rope, "original_max_position_embeddings", max_positions, where)
    original = count(config, "original_max_position_embeddings", original, where)
    scaling = RopeScaling(
        kind=cast(Literal["linear", "llama3", "yarn"], kind),
        factor=positive(rope, "factor", max_positions / original if kind == "yarn" else None, where),
        original_max_positions=max_positions if kind == "linear" else original,
    )
    if kind == "llama3":
        return _with_frequencies(scaling, rope, where)
    return _with_yarn(scaling, rope, where) if kind == "yarn" else scaling


def _with_frequencies(scaling: RopeScaling, rope: Mapping[str, Any], where: str) -> RopeScaling:
    low, high = (positive(rope, key, None, where) for key in ("low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise ConfigError("MRL-1205", f"{where}: high_freq_factor={high:g} must be above low_freq_factor={low:g}.")
    return RopeScaling(
        scaling.kind, scaling.factor, scaling.original_max_positions, low_freq_factor=low, high_freq_factor=high
    )


def _with_yarn(scaling: RopeScaling, rope: Mapping[str, Any], where: str) -> RopeScaling:
    return RopeScaling(
        scaling.kind,
        scaling.factor,
        scaling.original_max_positions,
        # 0 counts as absent, as in transformers
        beta_fast=positive(rope, "beta_fast", 32.0, where) if rope.get("beta_fast") else 32.0,
        beta_slow=positive(rope, "beta_slow", 1.0, where) if rope.get("beta_slow") else 1.0,
        attention_factor=_given(rope, "attention_factor", where),
        mscale=_given(rope, "mscale", where) if rope.get("mscale") else None,
        mscale_all_dim=_given(rope, "mscale_all_dim", where) if rope.get("mscale_all_dim") else None,
        truncate=switch(rope, "truncate", True, where),
    )


def _require(rope: Mapping[str, Any], keys: tuple[str, ...], where: str) -> None:
    missing = [key for key in keys if key not in rope]
    if missing:
        raise ConfigError("MRL-1205", f"{where}: {', '.join(missing)} must be given.")


def _given(rope: Mapping[str, Any], key: str, where: str) -> float | None:
    return None if rope.get(key) is None else positive(rope, key, None, where)
