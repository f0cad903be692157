"""What may change between two starts of one run, and what would make it another run.

A run that resumes goes on with the weights, the data order and the record of the one that stopped. Settings that these
depend on must be the same; any other may change, and is named in the log.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.data import SHOWN_HASH_DIGITS
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.excerpt import excerpt
from megarl.run.progress import Progress, data_hashes, template_digest

# Sections and settings (everything below a section counts) that already decided what the finished steps did.
_FIXED = (
    "run.name",
    "run.seed",
    "model",
    "data",
    "chat",
    "warmup",
    "algorithm.name",
    "critic.path",
    "rollout.replay",
    "rollout.only",
)
# What they decide is where a run stops, not what it did before.
_FREE = ("data.accept_changed", "data.too_long", "data.bad_rows", "data.max_bad_rows")
_ABSENT = object()

Change = tuple[str, Any, Any]


def require_same_run(config: RunConfig, progress: Progress) -> list[str]:
    """Refuse a configuration that makes another run; otherwise what changed, one line for each setting."""
    changes = list(changes_between(progress.config, config.model_dump(mode="json")))
    refused = [change for change in changes if not _may_change(change)]
    if refused:
        listing = "\n".join(f"    {_line(change)}" for change in refused)
        raise ConfigError(
            "MRL-1501",
            f"run {config.run.name!r} is at step {progress.step} and cannot go on with other settings:\n{listing}\n"
            "Set them back, start over with --fresh, or give this run another run.name.",
        )
    accepted = _require_same_data(config, progress)
    if template_digest(config) != progress.template_digest:
        raise ConfigError(
            "MRL-1438",
            f"the chat template (chat.template={config.chat.template!r}) is not the one that run {config.run.name!r} "
            f"started with; {progress.step} steps have learned to answer the old one.\n"
            "Put it back, start over with --fresh, or give this run another run.name.",
        )
    return [*(_line(change) for change in changes), *accepted]


def _require_same_data(config: RunConfig, progress: Progress) -> list[str]:
    """Refuse files that changed, unless the user names what they have become; otherwise one line for each."""
    hashes = data_hashes(config)
    changed = {path: found for path, found in hashes.items() if found != progress.data_hashes.get(path)}
    refused = [path for path, found in changed.items() if not found.startswith(tuple(config.data.accept_changed))]
    if refused:
        were = {path: progress.data_hashes.get(path, "nothing")[:SHOWN_HASH_DIGITS] for path in refused}
        listing = "\n".join(f"    {path}: was {were[path]}, is {changed[path][:SHOWN_HASH_DIGITS]}" for path in refused)
        # in quotes: 16 hexadecimal digits may look like a number
        wanted = ", ".join(f'"{found[:SHOWN_HASH_DIGITS]}"' for found in changed.values())
        raise ConfigError(
            "MRL-1502",
            f"training data changed since run {config.run.name!r} started; {progress.step} steps have drawn from what "
            f"it was:\n{listing}\n"
            "Put it back, start over with --fresh, or give this run another run.name. To go on with what it is now:\n"
            f"    'data.accept_changed=[{wanted}]'",
        )
    return [f"{path}: another content, accepted" for path in changed]


def _may_change(change: Change) -> bool:
    key, before, after = change
    if key in _FREE:
        return True
    if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED):
        return False
    if key == "algorithm.kl.coef":
        # a coefficient of 0 means that there is no reference model
        return before is not _ABSENT and after is not _ABSENT and (before > 0) == (after > 0)
    return True


def changes_between(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Every setting that is not the same: its key and both values."""
    for key in dict.fromkeys([*before, *after]):
        old, new = _only(before.get(key, _ABSENT)), _only(after.get(key, _ABSENT))
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from changes_between(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key}", old, new


def _only(value: Any) -> Any:
    """A list of one section (rewards) is that section: the list is not how most people write it."""
    is_one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], Mapping)
    return value[0] if is_one else value


def _line(change: Change) -> str:
    key, before, after = change
    return f"{key}: was {shown(before)}, is {shown(after)}"


def shown(value: Any) -> str:
    """A setting's value for a message."""
    if value is _ABSENT:
        return "not set"
    text = json.dumps(value)
    return text if len(text) <= 60 and text.isprintable() else excerpt(text)
