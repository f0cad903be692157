"""A ledger as columns, read line by line: ten thousand steps of a thousand metrics must fit into memory."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from megarl.core.errors import MissingInputError
from megarl.report.alerts import AlertLog
from megarl.report.device_memory import DeviceMemory, Pattern
from megarl.report.series import Column, is_number

_MAX_SHAPES = 64
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class _Shape(NamedTuple):
    """Where the metrics of a line go. Most lines have the names of an earlier one, and need no looking up."""

    columns: list[tuple[int, Column]]
    memory_positions: list[int]
    memory: Pattern | None


class RunHistory:
    """What a report needs of a ledger. Lines that are no steps are counted, not believed."""

    def __init__(self) -> None:
        self.columns: dict[str, Column] = {}
        self.memory = DeviceMemory()
        self.alerts = AlertLog()
        self._shapes: dict[tuple[str, ...], _Shape] = {}
        self.run_id: str | None = None
        self.num_devices: int | None = None
        self.first_time = math.inf
        self.last_time = -math.inf
        self.last_step = 0
        self.num_records = 0
        self.num_damaged = 0

    def take(self, line: bytes) -> None:
        """One line of the ledger."""
        try:
            record = json.loads(line)
            step, time, metrics = record["step"], record["time"], record["metrics"]
            is_step = isinstance(step, int) and abs(step) < 2**53 and isinstance(metrics, dict)
        except (ValueError, KeyError, TypeError, RecursionError):
            is_step = False
        if not is_step:
            self.num_damaged += 1
            return
        self.num_records += 1
        self.last_step = max(self.last_step, step)
        if is_number(time):
            self.first_time, self.last_time = min(self.first_time, time), max(self.last_time, time)
        self._take_metrics(step, metrics)
        self.alerts.take(step, record.get("alerts"))
        self._take_identity(record)

    def finish(self) -> None:
        """All lines were taken."""
        self.memory.close()
        self.columns = {name: column for name, column in self.columns.items() if len(column)}
        self.alerts.take_levels(self.columns)

    def _take_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        names = tuple(metrics)
        shape = self._shapes.get(names)
        if shape is None:
            shape = self._shapes[names] = self._shape_of(names)
        values = list(metrics.values())
        for position, column in shape.columns:
            value = values[position]
            if type(value) is not float:
                value = _as_float(value)
            if value is not None:
                column.append(step, value)
        if shape.memory is not None:
            shape.memory.take(step, [values[position] for position in shape.memory_positions])

    def _shape_of(self, names: tuple[str, ...]) -> _Shape:
        if len(self._shapes) >= _MAX_SHAPES:
            self._shapes.clear()
        positions, memory = self.memory.pattern(names)
        others = sorted(set(range(len(names))) - set(positions))
        return _Shape([(position, self._column(names[position])) for position in others], positions, memory)

    def _column(self, name: str) -> Column:
        if name not in self.columns:
            self.columns[name] = Column()
        return self.columns[name]

    def _take_identity(self, record: dict[str, Any]) -> None:
        run_id, meta = record.get("run_id"), record.get("meta")
        if isinstance(run_id, str):
            self.run_id = run_id
        if isinstance(meta, dict) and isinstance(meta.get("num_devices"), int):
            self.num_devices = meta["num_devices"]


def read_history(directory: Path) -> RunHistory:
    """The ledger of a run. A last line without its end of line was never finished and is left out."""
    path = directory / "metrics.jsonl"
    where = f"{path.parent.name}/{path.name}"
    history = RunHistory()
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    history.take(line)
    except OSError as error:
        raise MissingInputError(
            "MRL-4901", f"{where} cannot be read: {error.strerror}.\nName the directory of a run, such as runs/NAME."
        ) from error
    if history.num_records == 0:
        raise MissingInputError("MRL-4902", f"{where} has no steps yet.\nMake the report when the run has made a step.")
    history.finish()
    return history


def _as_float(value: object) -> float | None:
    """A number of the ledger, however it is written; None for anything else."""
    if isinstance(value, str):
        return _NON_FINITE.get(value)
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    return None
