"""Metrics in the spelling of a dialect. A view changes names only: never a value, never which quantities exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, cast

from megarl.metrics.registry import canonical, find

View = Literal["native", "roll", "verl", "trinity", "all"]


def spell(metrics: Mapping[str, float], view: View) -> dict[str, float]:
    """The metrics under the names of the view, in the order given; unknown names go under ``user/``.

    ``native`` is canonical names; a dialect uses its own spelling where it has one; ``all`` is canonical names and
    every alias. Values become plain ``int`` (counts of the catalogue, integers of users) or ``float``.
    """
    spelled: dict[str, float] = {}
    for name, value in metrics.items():
        metric = find(name)
        if metric is None:
            spelled[canonical(name)] = int(value) if isinstance(value, int) else float(value)
            continue
        number = int(value) if metric.is_whole and float(value).is_integer() else float(value)
        if view == "all":
            spelled.update(dict.fromkeys([name, *metric.aliases.values()], number))
        else:
            spelled[metric.aliases.get(view, name)] = number
    return spelled


class Spelling:
    """How a sink spells metrics: the names of one view, or of several together."""

    def __init__(self, views: Sequence[str], phases: Sequence[str] = (), memory: str = "device") -> None:
        self._views = cast(list[View], list(views))
        self._phases = tuple(phases)
        self._memory = memory

    def spell(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics under the names of the views, in the order given."""
        spelled: dict[str, float] = {}
        for view in self._views:
            spelled |= spell(metrics, view)
        return spelled
