"""Where the time of the steps went: seconds of every phase, stacked up to the wall time of the step."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from megarl.report.series import Column, Floats, Steps, number, numbers

WALL = "timing_s/step_wall"
OTHER = "other"
_PHASE = re.compile(r"time/([^/]+/[^/]+)/total")
_TIMER = re.compile(r"timing_s/(.+)")
# Timers that contain others, or lie inside one: stacking them would count seconds twice.
_NOT_STACKED = ("step", "step_wall", "generate_sequences")
_MAX_LAYERS = 9
_MAX_STRETCHES = 500


def phase_time(columns: dict[str, Column]) -> dict[str, Any] | None:
    """The stack over the steps and a table of totals; None if the ledger has no wall times.

    Of a long run each point of the stack is the mean of a stretch of steps, so that areas stay true.
    """
    if WALL not in columns:
        return None
    steps, wall = columns[WALL].steps, np.nan_to_num(columns[WALL].values, posinf=0.0, neginf=0.0)
    seconds = {name: _aligned(column, steps) for name, column in _phases(columns).items()}
    names = sorted(seconds, key=lambda name: -float(seconds[name].sum()))
    stacked = names[:_MAX_LAYERS]
    rest = np.maximum(wall - sum((seconds[name] for name in stacked), np.zeros(len(wall))), 0.0)
    size = max(1, -(-len(steps) // _MAX_STRETCHES))
    return {
        "stretch": size,
        "steps": steps[::size].tolist(),
        "wall": numbers(_means(wall, size)),
        "layers": [{"name": name, "seconds": numbers(_means(seconds[name], size))} for name in stacked]
        + [{"name": OTHER, "seconds": numbers(_means(rest, size))}],
        "table": [_row(columns, name, seconds[name], wall) for name in names] + [_other_row(rest, wall)],
        "wall_total": float(wall.sum()),
    }


def _phases(columns: dict[str, Column]) -> dict[str, Column]:
    """The phases of the ranks; the driver's timers where the ledger has no phases."""
    found = {match[1]: column for name, column in columns.items() if (match := _PHASE.fullmatch(name))}
    if found:
        return found
    timers = {match[1]: column for name, column in columns.items() if (match := _TIMER.fullmatch(name))}
    return {name: column for name, column in timers.items() if name not in _NOT_STACKED}


def _aligned(column: Column, steps: Steps) -> Floats:
    """The values at ``steps``, 0 where there is none."""
    aligned = np.zeros(len(steps))
    places = np.searchsorted(steps, column.steps)
    fits = (places < len(steps)) & np.isfinite(column.values)
    fits[fits] = steps[places[fits]] == column.steps[fits]
    aligned[places[fits]] = column.values[fits]
    return aligned


def _means(values: Floats, size: int) -> list[float]:
    starts = np.arange(0, len(values), size)
    means: list[float] = (np.add.reduceat(values, starts) / np.diff(starts, append=len(values))).tolist()
    return means


def _row(columns: dict[str, Column], name: str, seconds: Floats, wall: Floats) -> dict[str, Any]:
    row = {**_other_row(seconds, wall), "name": name}
    for part in ("onload", "execute", "offload", "skew"):
        column = columns.get(f"time/{name}/{part}")
        if column is not None:
            values = column.values[column.steps > 0]
            row[part] = number(float(values[np.isfinite(values)].sum()))
    return row


def _other_row(seconds: Floats, wall: Floats) -> dict[str, Any]:
    total, num_steps = float(seconds.sum()), int(np.count_nonzero(seconds))
    return {
        "name": OTHER,
        "total": total,
        "share": total / max(float(wall.sum()), 1e-9),
        "steps": num_steps,
        "mean": total / max(num_steps, 1),
    }
