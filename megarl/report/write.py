"""``megarl report``: everything that a run directory holds, as one page."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.core.errors import StorageError
from megarl.report.curves import curves_for, describe
from megarl.report.headline import Fact, compare, headline
from megarl.report.history import RunHistory, read_history
from megarl.report.page import render
from megarl.report.phase_time import phase_time
from megarl.report.samples import read_samples
from megarl.report.series import SeriesTable, is_number
from megarl.report.settings import Settings, differing, read_settings
from megarl.report.timeline import read_timeline

_DEVICE_FIELDS = (
    "device", "rank", "node", "hostname", "local_index", "name", "uuid", "total_gib", "peak_tflops", "tp", "pp", "cp",
    "dp",
)  # fmt: skip


def write_report(directory: Path, out: Path | None = None, other: Path | None = None) -> Path:
    """Write the report of a run, to ``report.html`` in its directory if ``out`` says nothing else; where it is.

    With ``other`` both runs are compared. The page appears whole or not at all.
    """
    ours = _read_run(directory)
    theirs = _read_run(other) if other is not None else None
    names = [*ours.page["series"], *(theirs.page["series"] if theirs else ())]
    data: dict[str, Any] = {
        "version": __version__,
        "written": time.time(),
        "runs": [ours.page, *([theirs.page] if theirs else ())],
        "charts": curves_for(dict.fromkeys(names)),
        "about": {name: about for name in dict.fromkeys(names) if (about := describe(name)) is not None},
    }
    if theirs is not None and other is not None:
        if ours.page["name"] == theirs.page["name"]:
            ours.page["name"], theirs.page["name"] = (
                str(Path(*path.resolve().parts[-2:])) for path in (directory, other)
            )
        data["comparison"] = {
            "numbers": compare(ours.facts, theirs.facts),
            "settings": differing(ours.settings, theirs.settings),
        }
    path = out if out is not None else directory / "report.html"
    unfinished = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(render(data), encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise StorageError("MRL-7901", f"{path} cannot be written: {error.strerror}.") from error
    return path


@dataclass(frozen=True, slots=True)
class _Run:
    """A run directory as the page shows it, and what a comparison needs besides."""

    page: dict[str, Any]
    facts: list[Fact]
    settings: Settings


def _read_run(directory: Path) -> _Run:
    history = read_history(directory)
    settings = read_settings(directory)
    devices = _read_devices(directory)
    capacity = _capacities(devices)
    warmup_steps = settings.whole("warmup.num_steps", 0)
    seconds, heat_map = phase_time(history.columns), history.memory.heat_map()
    facts = headline(history, seconds, heat_map, capacity, warmup_steps)
    table = SeriesTable()
    columns = sorted([*history.columns.items(), *history.memory.columns()], key=lambda item: item[0])
    page = {
        "name": directory.resolve().name,
        "run_id": history.run_id,
        "layout": settings.layout,
        "device": _device_names(devices, settings, history),
        "started": history.first_time if math.isfinite(history.first_time) else None,
        "ended": history.last_time if math.isfinite(history.last_time) else None,
        "warmup_steps": warmup_steps,
        "num_damaged": history.num_damaged,
        "tiles": [fact.as_json() for fact in facts],
        "series": {name: table.encode(column) for name, column in columns},
        "grids": table.grids,
        "time": seconds,
        "timeline": read_timeline(directory),
        "memory": heat_map,
        "capacity": {str(device): gib for device, gib in capacity.items()},
        "alerts": history.alerts.rows(),
        "config": settings.text,
        "devices": devices,
        "samples": read_samples(directory, settings),
    }
    return _Run(page, facts, settings)


def _read_devices(directory: Path) -> list[dict[str, Any]]:
    """The rows of ``devices.json``, as far as they are what they should be."""
    try:
        rows = json.loads((directory / "devices.json").read_bytes())
    except (OSError, ValueError):
        return []
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [{key: row[key] for key in _DEVICE_FIELDS if _is_plain(row.get(key))} for row in rows]


def _is_plain(value: object) -> bool:
    """Text, or a number that JSON can write."""
    return isinstance(value, str) or is_number(value)


def _capacities(devices: list[dict[str, Any]]) -> dict[int, float]:
    """GiB by the device's number, where both are known."""
    found = {}
    for row in devices:
        device, gib = row.get("device"), row.get("total_gib")
        if isinstance(device, int) and is_number(gib) and gib > 0:
            found[device] = float(gib)
    return found


def _device_names(devices: list[dict[str, Any]], settings: Settings, history: RunHistory) -> str:
    """``8 × H100 80GB``; what is known of it."""
    count = len({row.get("device") for row in devices}) or history.num_devices
    kind = ", ".join(sorted({str(row["name"]) for row in devices if "name" in row}))
    if not kind and settings.get("run.device") != "auto":
        kind = str(settings.get("run.device", ""))
    return f"{count} × {kind}" if count and kind else kind
