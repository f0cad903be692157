"""Metrics in the spelling of a dialect. A view changes names only: never a value, never which quantities exist."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from megarl.metrics.across import MAX_DEVICES_SHOWN
from megarl.metrics.registry import canonical, find

# the views of phases by their name alone, where only one model has such a phase: ROLL's documents have both spellings
_BARE_PHASES = ("all", "roll")
_OF_PHASE = re.compile(r"(time/|memory/cpu/|memory/)([^/]+/[^/]+)(/.+)")
_OF_DEVICE = re.compile(r"(memory/.+)/([0-9]+)")


class _Name(NamedTuple):
    """What becomes of a canonical name."""

    spellings: tuple[str, ...]
    is_whole: bool


class Spelling:
    """The names that one place gets.

    ``native`` is canonical names; a dialect uses its own spelling where it has one; ``all`` is canonical names and all
    aliases. Several views together give the names of each. ``phases`` are the run's, as ``cluster/phase``. Memory of
    more than ``max_devices`` is summed up: the largest, the smallest, the mean, and whose is the largest.
    """

    def __init__(
        self, views: Sequence[str], phases: Iterable[str] = (), max_devices: float = MAX_DEVICES_SHOWN
    ) -> None:
        self._views = tuple(views)
        self._max_devices = max_devices
        num_clusters = Counter(phase.rpartition("/")[2] for phase in phases)
        self._single = {phase for phase, count in num_clusters.items() if count == 1}
        self._known: dict[str, _Name] = {}

    def spell(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics under the view's names, in the order given; unknown names go under ``user/``.

        Values become plain ``int`` (counts of the catalogue, integers of users) or ``float``.
        """
        spelled: dict[str, float] = {}
        for name, value in self._few_devices(metrics).items():
            known = self._known.get(name)
            if known is None:
                known = self._known[name] = self._name(name)
            whole = isinstance(value, int) or (known.is_whole and float(value).is_integer())
            spelled.update(dict.fromkeys(known.spellings, int(value) if whole else float(value)))
        return spelled

    def _name(self, name: str) -> _Name:
        metric = find(name)
        if metric is None:
            return _Name((canonical(name),), False)
        spellings: dict[str, None] = {}
        for view in self._views:
            own = [alias for dialect, alias in metric.aliases.items() if view in ("all", dialect.partition("-")[0])]
            spellings |= dict.fromkeys([name, *own] if view == "all" or not own else own)
            phase = _OF_PHASE.fullmatch(name)
            if phase and view in _BARE_PHASES and (bare := phase[2].rpartition("/")[2]) in self._single:
                spellings[phase[1] + bare + phase[3]] = None
        return _Name(tuple(spellings), metric.is_whole)

    def _few_devices(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        if math.isinf(self._max_devices):
            return metrics
        of_device = {name: found for name in metrics if (found := _OF_DEVICE.fullmatch(name))}
        if len({found[2] for found in of_device.values()}) <= self._max_devices:
            return metrics
        series: dict[str, dict[int, float]] = {}
        for name, found in of_device.items():
            series.setdefault(found[1], {})[int(found[2])] = metrics[name]
        few = {name: value for name, value in metrics.items() if name not in of_device}
        for stem, values in series.items():
            fullest = max(values, key=values.__getitem__)
            few[f"{stem}/max"], few[f"{stem}/min"] = values[fullest], min(values.values())
            few[f"{stem}/mean"], few[f"{stem}/argmax"] = sum(values.values()) / len(values), fullest
        return few
