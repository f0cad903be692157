"""A configuration as one flat table, to be compared with another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megarl.config.schema import RunConfig


def flat_settings(config: RunConfig) -> dict[str, str]:
    """Dotted name -> value as JSON, for every setting. Two configurations are equal if these are."""
    return dict(_flatten("", config.model_dump(mode="json")))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _flatten(f"{name}.{key}" if name else str(key), child)
    else:
        yield name, json.dumps(value, sort_keys=True)
