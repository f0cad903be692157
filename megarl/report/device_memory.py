"""Memory per device and phase: too many names to keep as curves, so they are folded while the ledger is read.

``memory/{cluster}/{phase}/{start,end}/{onload,offload}/{kind}/{device}`` has 18 kinds for each phase and device. What
stays of one kind: each device's largest and latest value, and over the steps the fullest and the emptiest device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from megarl.report.series import Column, number

# Up to this many devices, each one has its own curve.
MAX_CURVES = 8
_NAME = re.compile(r"(memory/([^/]+/[^/]+)/((?:start|end)/(?:onload|offload))/([a-z_]+))/([0-9]{1,9})")
# measure of the heat map -> the kinds that it is the largest of, each with the snapshot it is taken from (None: any)
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
        self.peak: dict[int, float] = {}
        self.latest: dict[int, float] = {}
        self.row: dict[int, float] = {}

    def close_row(self, step: int) -> None:
        row, peak = self.row, self.peak
        self.largest.append(step, max(row.values()))
        self.smallest.append(step, min(row.values()))
        self.latest = row
        for device, value in row.items():
            if value > peak.get(device, -math.inf):
                peak[device] = value
            if device < MAX_CURVES:
                self.curves.setdefault(device, Column()).append(step, value)
        self.row = {}


class DeviceMemory:
    """Takes the memory metrics of one step after the other."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}
        self._places: dict[str, tuple[_Kind, int] | None] = {}

    def take(self, name: str, value: float) -> bool:
        """Whether the metric is one of a device; then it is in the current step's row. Non-finite values are not."""
        if name not in self._places:
            self._places[name] = self._place(name)
        place = self._places[name]
        if place is None:
            return False
        if math.isfinite(value):
            place[0].row[place[1]] = value
        return True

    def end_step(self, step: int) -> None:
        """All metrics of the step were taken."""
        for kind in self._kinds.values():
            if kind.row:
                kind.close_row(step)

    @property
    def devices(self) -> list[int]:
        """Every device that reported anything."""
        return sorted({device for kind in self._kinds.values() for device in kind.peak})

    def columns(self) -> Iterator[tuple[str, Column]]:
        """As metrics: each device's own up to eight devices, else those of the fullest and emptiest device."""
        num_devices = len(self.devices)
        own = self.devices == list(range(num_devices)) and num_devices <= MAX_CURVES
        for kind in self._kinds.values():
            if own:
                yield from ((f"{kind.name}/{device}", column) for device, column in sorted(kind.curves.items()))
            else:
                yield f"{kind.name}/[largest of {num_devices} devices]", kind.largest
                yield f"{kind.name}/[smallest of {num_devices} devices]", kind.smallest

    def heat_map(self) -> dict[str, Any] | None:
        """For every measure and statistic one row per phase with one value per device; None without any memory."""
        if not self._kinds:
            return None
        devices = self.devices
        phases = sorted({kind.phase for kind in self._kinds.values()})
        measures: dict[str, Any] = {}
        for measure, (wanted, snapshot) in _MEASURES.items():
            kinds = [k for k in self._kinds.values() if k.kind == wanted and snapshot in (None, k.snapshot)]
            if not kinds:
                continue
            of_phase = {phase: [kind for kind in kinds if kind.phase == phase] for phase in phases}
            measures[measure] = {
                "peak": [_row([kind.peak for kind in of_phase[phase]], devices) for phase in phases],
                "latest": [_row([kind.latest for kind in of_phase[phase]], devices) for phase in phases],
                "names": [_fullest(of_phase[phase]) for phase in phases],
            }
        return {"devices": devices, "phases": phases, "measures": measures}

    def _place(self, name: str) -> tuple[_Kind, int] | None:
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        family, phase, snapshot, kind, device = found.groups()
        if family not in self._kinds:
            self._kinds[family] = _Kind(family, phase, snapshot, kind)
        return self._kinds[family], int(device)


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
