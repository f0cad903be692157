"""What may change between two starts of one run, and what would make it another run.

A run that resumes goes on with the weights, the data order and the record of the one that stopped. Settings that these
depend on must be the same; any other may change, and is named in the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.excerpt import excerpt
from megarl.run.progress import Progress, data_digest

# Sections and settings (everything below a section counts) that already decided what the finished steps did.
_FIXED = (
    "run.name",
    "run.seed",
    "model",
    "data",
    "warmup",
    "algorithm.name",
    "critic.path",
    "rollout.replay",
    "rollout.only",
)
_ABSENT = object()

Change = tuple[str, Any, Any]


def require_same_run(config: RunConfig, progress: Progress) -> list[str]:
    """Refuse a configuration that makes another run; otherwise what changed, one line for each setting."""
    changes = list(_changes(progress.config, config.model_dump(mode="json")))
    refused = [change for change in changes if not _may_change(change)]
    if refused:
        listing = "\n".join(f"    {_line(change)}" for change in refused)
        raise ConfigError(
            "MRL-1501",
            f"run {config.run.name!r} is at step {progress.step} and cannot go on with other settings:\n{listing}\n"
            "Set them back, start over with --fresh, or give this run another run.name.",
        )
    if data_digest(config) != progress.data_digest:
        raise ConfigError(
            "MRL-1502",
            f"data.train={config.data.train!r} has other rows than when run {config.run.name!r} started; "
            f"{progress.step} steps have drawn from the old ones.\n"
            "Put the file back, start over with --fresh, or give this run another run.name.",
        )
    return [_line(change) for change in changes]


def _may_change(change: Change) -> bool:
    key, before, after = change
    if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED):
        return False
    if key == "algorithm.kl.coef":
        # a coefficient of 0 means that there is no reference model
        return before is not _ABSENT and after is not _ABSENT and (before > 0) == (after > 0)
    return True


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    for key in dict.fromkeys([*before, *after]):
        old, new = _only(before.get(key, _ABSENT)), _only(after.get(key, _ABSENT))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _changes(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def _only(value: Any) -> Any:
    """A list of one section (rewards) is that section: the list is not how most people write it."""
    is_one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping)
    return value[0] if is_one else value


def _line(change: Change) -> str:
    key, before, after = change
    return f"{key}: was {_shown(before)}, is {_shown(after)}"


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "not set"
    text = json.dumps(value)
    return text if len(text) <= 60 and text.isprintable() else excerpt(text)
