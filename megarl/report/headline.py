"""The few numbers that a reader looks for first, of one run or of two side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.report.history import RunHistory
from megarl.report.phase_time import OTHER, WALL
from megarl.report.series import Column, Floats, number

_WINDOW = 10
_WARN_SHARE, _CRITICAL_SHARE = 0.92, 0.97
_LEVELS = {1: "info", 2: "warning", 3: "critical"}


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its name; ``unit`` says how it is written. ``tone`` is empty, warning or critical."""

    label: str
    value: float
    unit: str
    detail: str
    tone: str = ""

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        fields = {"label": self.label, "unit": self.unit, "detail": self.detail, "tone": self.tone}
        return {**fields, "value": number(self.value)}


def headline(
    history: RunHistory,
    time: dict[str, Any] | None,
    heat_map: dict[str, Any] | None,
    capacity: dict[int, float],
    first_step: int,
) -> list[Fact]:
    """What there is to say. Changes count from ``first_step`` on: the warm-up is not the algorithm's merit."""
    columns = history.columns
    facts = [
        *_evaluations(columns, first_step),
        *_training_score(columns, first_step),
        *_steps(history),
        *_speed(columns),
        *_largest_phase(time),
        *_memory(columns, heat_map, capacity),
        _alerts(history),
    ]
    return facts


def _evaluations(columns: dict[str, Column], first_step: int) -> Iterator[Fact]:
    for name in sorted(columns):
        if name.startswith("eval/") and "/score/mean@" in name:
            steps, values = _finite(columns[name])
            if len(steps) == 0:
                continue
            start = min(int(np.searchsorted(steps, first_step)), len(steps) - 1)
            task = name.removeprefix("eval/").split("/score/")[0]
            unit = _score_unit(values)
            change, best = _change(values[-1] - values[start], unit), _plain(values.max(), unit)
            detail = f"{change} since step {steps[start]}, best {best}"
            yield Fact(f"Evaluation: {task}", float(values[-1]), unit, detail)


def _training_score(columns: dict[str, Column], first_step: int) -> Iterator[Fact]:
    if "critic/score/mean" not in columns:
        return
    steps, values = _finite(columns["critic/score/mean"])
    values = values[steps >= min(first_step, steps[-1])] if len(steps) else values
    if len(values):
        size = min(_WINDOW, -(-len(values) // 2))
        first, last = float(values[:size].mean()), float(values[-size:].mean())
        unit = _score_unit(values)
        yield Fact(
            "Training score", last, unit, f"mean of {size} steps, {_change(last - first, unit)} since the first {size}"
        )


def _steps(history: RunHistory) -> Iterator[Fact]:
    detail = ""
    if WALL in history.columns:
        _, wall = _finite(history.columns[WALL])
        if len(wall):
            detail = f"{duration(float(wall.sum()))} in steps, median {duration(float(np.median(wall)))}"
    yield Fact("Steps", history.last_step, "count", detail)


def _speed(columns: dict[str, Column]) -> Iterator[Fact]:
    if "perf/total_num_tokens" not in columns or WALL not in columns:
        return
    tokens, wall = columns["perf/total_num_tokens"], columns[WALL]
    seconds = float(np.nansum(wall.values[np.isin(wall.steps, tokens.steps)]))
    if seconds > 0:
        rate = float(np.nansum(tokens.values)) / seconds
        yield Fact("Tokens per second", rate, "count", "prompts and responses, all devices, whole steps")


def _largest_phase(time: dict[str, Any] | None) -> Iterator[Fact]:
    phases = [row for row in time["table"] if row["name"] != OTHER] if time else []
    if phases:
        yield Fact("Largest phase", phases[0]["share"], "share", f"{phases[0]['name']}, share of the time of all steps")


def _memory(columns: dict[str, Column], heat_map: dict[str, Any] | None, capacity: dict[int, float]) -> Iterator[Fact]:
    """The fullest device by reserved memory, which is what runs out; the host process where there is no device."""
    measures = heat_map["measures"] if heat_map else {}
    measure = measures.get("max_reserved") or measures.get("max_allocated")
    if heat_map and measure:
        cells = [
            (value / capacity.get(device, 0.0) if capacity.get(device) else 0.0, value, device, phase)
            for phase, row in zip(heat_map["phases"], measure["peak"], strict=True)
            for device, value in zip(heat_map["devices"], row, strict=True)
            if value is not None
        ]
        share, gib, device, phase = max(cells)
        where = f"device {device} in {phase}"
        if share > 0:
            tone = "critical" if share >= _CRITICAL_SHARE else "warning" if share >= _WARN_SHARE else ""
            yield Fact("Peak memory", share, "share", f"{gib:.1f} GiB, {where}", tone)
        else:
            yield Fact("Peak memory", gib, "GiB", where)
    elif "perf/max_memory_reserved_gb" in columns:
        _, values = _finite(columns["perf/max_memory_reserved_gb"])
        if len(values):
            yield Fact("Peak memory", float(values.max()), "GiB", "the largest process")


def _alerts(history: RunHistory) -> Fact:
    rows = history.alerts.rows()
    counts = {level: sum(row["count"] for row in rows if row["severity"] == level) for level in (3, 2, 1)}
    detail = ", ".join(f"{count} {_LEVELS[level]}" for level, count in counts.items() if count)
    tone = "critical" if counts[3] else "warning" if counts[2] else ""
    return Fact("Alerts", sum(counts.values()), "count", detail or "no health rule has spoken", tone)


def compare(ours: list[Fact], theirs: list[Fact]) -> list[dict[str, Any]]:
    """The numbers of both runs by label, with their difference where both have one of the same unit."""
    other = {fact.label: fact for fact in theirs}
    labels = [*(fact.label for fact in ours), *(label for label in other if label not in {f.label for f in ours})]
    mine = {fact.label: fact for fact in ours}
    rows = []
    for label in labels:
        pair = [table.get(label) for table in (mine, other)]
        units = {fact.unit for fact in pair if fact}
        row: dict[str, Any] = {"label": label, "values": [fact and fact.as_json() for fact in pair]}
        if pair[0] and pair[1] and len(units) == 1:
            row["difference"] = number(pair[1].value - pair[0].value)
        rows.append(row)
    return rows


def duration(seconds: float) -> str:
    """``0.31 s``, ``4 min 10 s``, ``3 h 12 min``, ``2 d 4 h``."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    whole = int(seconds)
    if whole < 100 * 60:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 100 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def _finite(column: Column) -> tuple[Any, Floats]:
    is_finite = np.isfinite(column.values)
    return column.steps[is_finite], column.values[is_finite]


def _score_unit(values: Floats) -> str:
    """Scores between 0 and 1 are read as shares of right answers."""
    return "share" if values.min() >= 0 and values.max() <= 1 else "score"


def _plain(value: float, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.4g}"


def _change(value: float, unit: str) -> str:
    return f"{100 * value:+.1f} points" if unit == "share" else f"{value:+.4g}"
