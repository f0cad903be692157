"""Numbers of a Hugging Face ``config.json``, each checked, with an error that names the file and the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.core.errors import ConfigError

_LARGEST = 10**12  # beyond any model; also refuses NaN and infinity


def is_count(value: Any) -> bool:
    """A whole number above 0 that could describe a model."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _LARGEST


def count(config: Mapping[str, Any], key: str, default: int, where: str) -> int:
    """The whole number above 0 at ``key``; ``default`` if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not is_count(value):
        raise ConfigError("MRL-1203", f"{where}: {key}={str(value)[:80]!a} must be a whole number above 0.")
    return int(value)


def positive(config: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    """The number above 0 at ``key``; ``default`` if it is absent or null, unless there is none."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value <= _LARGEST:
        raise ConfigError("MRL-1203", f"{where}: {key}={str(value)[:80]!a} must be a number above 0.")
    return float(value)


def switch(config: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    """The boolean at ``key``; ``default`` if it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError("MRL-1203", f"{where}: {key}={str(value)[:80]!a} must be true or false.")
    return value
