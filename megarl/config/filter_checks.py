"""Filters whose options are wrong, or that would leave nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megarl.config import catalogue
from megarl.config.filters import FilterSettings
from megarl.config.names import FILTERS
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.schema import RunConfig


def check_filters(config: RunConfig) -> Iterator[Problem]:
    """Every mistake in ``rollout.filters``. Options of the user's own functions are checked when these are imported."""
    if config.rollout is None:
        return
    for position, one in enumerate(config.rollout.filters):
        path: KeyPath = ("rollout", "filters", str(position))
        if one.name in FILTERS:
            yield from _options(one, (*path, "options"))
        if one.name == "reward_range":
            yield from _range(one, path)
        if one.name == "zero_variance" and config.rollout.group_size < 2:
            yield Problem(
                "MRL-1005",
                f"{dotted(path)}=zero_variance would drop everything: rollout.group_size=1, and one reward never "
                "differs from itself.",
                (path, ("rollout", "group_size")),
                ("Set rollout.group_size to 2 or more, or take the filter out.",),
            )


def _options(one: FilterSettings, path: KeyPath) -> Iterator[Problem]:
    known = FILTERS[one.name]
    for option, value in one.options.items():
        if option not in known:
            close = catalogue.closest(option, known)
            meant = f" Did you mean {close}?" if close else ""
            yield Problem(
                "MRL-1001",
                f"{dotted((*path, option))} is not an option of {one.name}.{meant}",
                (path,),
                (f"Options of {one.name}: {', '.join(known) or 'none'}.",),
            )
        elif not _fits(option, value):
            yield Problem(
                "MRL-1003",
                f"{dotted((*path, option))}={show(value)} is not allowed. It must be {known[option]}.",
                (path,),
            )


def _fits(option: str, value: Any) -> bool:
    if option == "drop":
        return value in ("samples", "group")
    if option == "max_tokens":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _range(one: FilterSettings, path: KeyPath) -> Iterator[Problem]:
    low, high = one.options.get("low"), one.options.get("high")
    if low is None and high is None:
        yield Problem(
            "MRL-1002",
            f"{dotted(path)}=reward_range needs a limit.",
            (path,),
            ("Write {name: reward_range, options: {low: 0.1, high: 0.9}}; one of the two is enough.",),
        )
    elif isinstance(low, (int, float)) and isinstance(high, (int, float)) and low > high:
        yield Problem(
            "MRL-1005",
            f"{dotted(path)} would drop everything: low={show(low)} is above high={show(high)}.",
            (path,),
            ("Exchange them.",),
        )
