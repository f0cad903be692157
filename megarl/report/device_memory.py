"""Memory per device and phase: too many names to keep as curves, so they are folded while the ledger is read.

``memory/{cluster}/{phase}/{start,end}/{onload,offload}/{kind}/{device}`` has 18 kinds for each phase and device. What
stays of one kind: each device's largest and latest value, and over the steps the fullest and the emptiest device.

64 devices make nine thousand names a step. Most steps have the same ones, so names are looked at once (`Pattern`) and
values are folded as arrays. Non-finite values do not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megarl.report.series import Column, Floats, are_numbers, number

# Up to this many devices, each one has its own curve.
MAX_CURVES = 8
_NAME = re.compile(r"(memory/([^/]+/[^/]+)/((?:start|end)/(?:onload|offload))/([a-z_]+))/([0-9]{1,9})")
# measure of the heat map -> the kind that it shows, and the snapshot it is taken from (None: the largest of all)
_MEASURES = {
    "max_allocated": ("max_allocated", None),
    "max_reserved": ("max_reserved", None),
    "left_allocated": ("allocated", "end/offload"),
}


class _Kind:
    """One name without its device."""

    def __init__(self, name: str, phase: str, snapshot: str, kind: str) -> None:
        self.name, self.phase, self.snapshot, self.kind = name, phase, snapshot, kind
        self.largest, self.smallest = Column(), Column()
        self.curves: dict[int, Column] = {}
        # by device; `latest` with the step it is of
        self.peak: dict[int, float] = {}
        self.latest: dict[int, tuple[int, float]] = {}

    def curve(self, device: int) -> Column:
        if device not in self.curves:
            self.curves[device] = Column()
        return self.curves[device]


class Pattern:
    """The memory metrics of all steps that have the same ones, ordered by kind."""

    def __init__(self, places: list[tuple[_Kind, int]]) -> None:
        """``places``: kind and device of every value, those of one kind together."""
        self._places = places
        self._kinds = list(dict.fromkeys(kind for kind, _ in self._places))
        names = [kind.name for kind, _ in self._places]
        self._starts = [names.index(kind.name) for kind in self._kinds]
        self._has_curves = all(device < MAX_CURVES for _, device in self._places)
        self._peak = np.full(len(places), np.nan)
        self._latest = np.full(len(places), np.nan)
        self._step = 0

    def take(self, step: int, values: Sequence[Any]) -> None:
        """The values of one step, in the order of the places."""
        row = _as_array(values)
        row[~are_numbers(row)] = np.nan
        self._peak = np.fmax(self._peak, row)
        self._latest, self._step = row, step
        largest, smallest = np.fmax.reduceat(row, self._starts), np.fmin.reduceat(row, self._starts)
        for kind, high, low in zip(self._kinds, largest.tolist(), smallest.tolist(), strict=True):
            if high == high:  # some device has a value
                kind.largest.append(step, high)
                kind.smallest.append(step, low)
        if self._has_curves:
            for (kind, device), value in zip(self._places, row.tolist(), strict=True):
                if value == value:
                    kind.curve(device).append(step, value)

    def close(self) -> None:
        """Give peaks and latest values to the kinds."""
        columns = zip(self._places, self._peak.tolist(), self._latest.tolist(), strict=True)
        for (kind, device), peak, latest in columns:
            if peak == peak:
                kind.peak[device] = max(peak, kind.peak.get(device, peak))
            if latest == latest:
                kind.latest[device] = max((self._step, latest), kind.latest.get(device, (self._step, latest)))


class DeviceMemory:
    """Takes the memory metrics of one step after the other; `close` it before asking for anything."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._places: dict[str, tuple[_Kind, int] | None] = {}
        self._patterns: dict[tuple[str, ...], Pattern] = {}

    def pattern(self, names: Sequence[str]) -> tuple[list[int], Pattern | None]:
        """The positions of memory metrics among ``names``, and what takes their values, in this order.

        Steps with the same memory metrics have one pattern, whatever else they have.
        """
        found = [(place, position) for position, name in enumerate(names) if (place := self._place(name))]
        if not found:
            return [], None
        found.sort(key=lambda item: (item[0][0].name, item[0][1]))
        positions = [position for _, position in found]
        key = tuple(names[position] for position in positions)
        if key not in self._patterns:
            self._patterns[key] = Pattern([place for place, _ in found])
        return positions, self._patterns[key]

    def close(self) -> None:
        """All steps were taken."""
        for pattern in self._patterns.values():
            pattern.close()

    @property
    def devices(self) -> list[int]:
        """Every device that reported anything."""
        return sorted({device for kind in self._kinds.values() for device in kind.peak})

    def columns(self) -> Iterator[tuple[str, Column]]:
        """As metrics: each device's own up to eight devices, else those of the fullest and emptiest device."""
        devices = self.devices
        has_curves = all(device < MAX_CURVES for device in devices)
        for kind in self._kinds.values():
            if has_curves:
                yield from ((f"{kind.name}/{device}", column) for device, column in sorted(kind.curves.items()))
            else:
                yield f"{kind.name}/[largest of {len(devices)} devices]", kind.largest
                yield f"{kind.name}/[smallest of {len(devices)} devices]", kind.smallest

    def heat_map(self) -> dict[str, Any] | None:
        """For every measure and statistic one row per phase with one value per device; None without any memory."""
        devices = self.devices
        if not devices:
            return None
        phases = sorted({kind.phase for kind in self._kinds.values()})
        measures: dict[str, Any] = {}
        for measure, (wanted, snapshot) in _MEASURES.items():
            kinds = [k for k in self._kinds.values() if k.kind == wanted and snapshot in (None, k.snapshot)]
            if not kinds:
                continue
            of_phase = [[kind for kind in kinds if kind.phase == phase] for phase in phases]
            measures[measure] = {
                "peak": [_row([kind.peak for kind in row], devices) for row in of_phase],
                "latest": [_row([_values(kind.latest) for kind in row], devices) for row in of_phase],
                "names": [_fullest(row) for row in of_phase],
            }
        return {"devices": devices, "phases": phases, "measures": measures}

    def _place(self, name: str) -> tuple[_Kind, int] | None:
        """Kind and device of a metric; None if it is not one of a device's memory."""
        if name not in self._places:
            found = _NAME.fullmatch(name)
            self._places[name] = (self._kind(found), int(found[5])) if found else None
        return self._places[name]

    def _kind(self, found: re.Match[str]) -> _Kind:
        if found[1] not in self._kinds:
            self._kinds[found[1]] = _Kind(found[1], found[2], found[3], found[4])
        return self._kinds[found[1]]


def _as_array(values: Sequence[Any]) -> Floats:
    """Numbers as they are, and what a ledger writes for non-finite ones; NaN for anything else."""
    try:
        return np.array(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.array([value if isinstance(value, float) else np.nan for value in values])


def _values(latest: dict[int, tuple[int, float]]) -> dict[int, float]:
    """Those of the kind's last step: a device that has stopped reporting has no latest value."""
    last = max((step for step, _ in latest.values()), default=0)
    return {device: value for device, (step, value) in latest.items() if step == last}


def _row(tables: list[dict[int, float]], devices: list[int]) -> list[float | str | None]:
    row: list[float | str | None] = []
    for device in devices:
        values = [table[device] for table in tables if device in table]
        row.append(number(max(values)) if values else None)
    return row


def _fullest(kinds: list[_Kind]) -> str | None:
    """The metric whose curves belong to the row: of several snapshots the one with the highest peak."""
    with_values = [kind for kind in kinds if kind.peak]
    if not with_values:
        return None
    return max(with_values, key=lambda kind: max(kind.peak.values())).name
