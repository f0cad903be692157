"""The resolved configuration of a run, fit to be shown to others: values of secret settings are hidden."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megarl.config.document import decode, parse_document
from megarl.config.secret_names import is_secret_key
from megarl.config.tree import plain
from megarl.core.errors import ConfigError

_HIDDEN = "(hidden)"


@dataclass(frozen=True, slots=True)
class Settings:
    """``tree`` as it was written, ``flat`` with dotted names, ``text`` as YAML; all empty if there is no file."""

    tree: dict[str, Any] = field(default_factory=dict)
    flat: dict[str, str] = field(default_factory=dict)
    text: str = ""

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a dotted name."""
        value: Any = self.tree
        for key in name.split("."):
            if not isinstance(value, dict) or value.get(key) is None:
                return default
            value = value[key]
        return value

    def whole(self, name: str, default: int) -> int:
        """A whole number; the default if the setting is anything else."""
        value = self.get(name)
        return value if isinstance(value, int) else default

    @property
    def layout(self) -> str:
        """How the policy is spread: ``2 ranks = tp 1 x pp 1 x dp 2``."""
        num_ranks = self.whole("run.num_ranks", 0)
        if num_ranks < 1:
            return ""
        sizes = {name: max(1, self.whole(f"actor.parallel.{name}_size", 1)) for name in ("tp", "pp", "cp")}
        sizes["dp"] = num_ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])
        product = " × ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name != "cp")
        return f"{num_ranks} ranks = {product}"


def read_settings(directory: Path) -> Settings:
    """``resolved.yaml``; empty settings if it is missing or is no configuration."""
    try:
        root = parse_document(decode((directory / "resolved.yaml").read_bytes(), "resolved.yaml"), "resolved.yaml", [])
    except (OSError, ConfigError):
        return Settings()
    tree = plain(root) if root is not None else None
    if not isinstance(tree, dict):
        return Settings()
    tree = _without_secrets(tree, "")
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=120)
    return Settings(tree, dict(_flatten(tree, "")), text)


def differing(ours: Settings, theirs: Settings) -> list[tuple[str, str, str]]:
    """Name, our value and their value of every setting that is not the same; a dash where one has no such setting."""
    names = [*ours.flat, *(name for name in theirs.flat if name not in ours.flat)]
    pairs = [(name, ours.flat.get(name, "–"), theirs.flat.get(name, "–")) for name in names]
    return [(name, mine, other) for name, mine, other in pairs if mine != other]


def _without_secrets(value: Any, name: str) -> Any:
    if value is not None and is_secret_key(name.rpartition(".")[2]):
        return _HIDDEN
    if isinstance(value, dict):
        return {key: _without_secrets(child, f"{name}.{key}" if name else key) for key, child in value.items()}
    if isinstance(value, list):
        return [_without_secrets(child, name) for child in value]
    return value


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flatten(child, f"{name}.{key}" if name else key)
    else:
        yield (
            name,
            yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6).split("\n...")[0].strip(),
        )
