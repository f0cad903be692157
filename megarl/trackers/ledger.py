"""The ledger of a run, ``metrics.jsonl``: one JSON object per step, kept for good.

``{"step": 3, "time": 1700000000.5, "run_id": "3fa9c1d2", "metrics": {"actor/lr": 1e-06, ...}, "alerts": [...],
"meta": {...}}`` with canonical names in alphabetical order and floats that read back bit for bit. JSON has no NaN:
non-finite values are "NaN", "Infinity", "-Infinity". ``alerts`` are those that the step raised, ``meta`` is the same in
every line of a start.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.core.errors import DataError, MissingInputError, StorageError
from megarl.trackers.json_numbers import number_for_json, number_from_json
from megarl.trackers.views import Spelling


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of a ledger."""

    step: int
    time: float
    metrics: dict[str, float]
    # {"rule", "severity", "message"} of every alert that the step raised
    alerts: tuple[dict[str, Any], ...] = ()


class Ledger:
    """Appends to a ledger. A line is whole or absent: a torn one (crash, full disk) is cut off, never built upon."""

    def __init__(self, path: Path, run_id: str = "", meta: Mapping[str, Any] | None = None) -> None:
        self._path = path
        self._run_id = run_id
        self._meta = dict(meta or {})
        # every device, however many: everything else is made from the ledger
        self._spelling = Spelling(["native"], max_devices=math.inf)
        try:
            # Unbuffered, so that a line is with the operating system (and an error here) when `log` returns.
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # closed by finish
            _cut_torn_line(path)
        except OSError as error:
            raise self._refused(error) from error

    def log(self, values: Mapping[str, float], step: int, alerts: Sequence[Mapping[str, Any]] = ()) -> None:
        """Append one step."""
        metrics = {name: number_for_json(value) for name, value in sorted(self._spelling.spell(values).items())}
        record = {
            "step": step,
            "time": time.time(),
            "run_id": self._run_id,
            "metrics": metrics,
            "alerts": [dict(alert) for alert in alerts],
            "meta": self._meta,
        }
        line = memoryview(json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n")
        end = os.fstat(self._file.fileno()).st_size
        try:
            while line:  # a nearly full disk may take only a part at first
                line = line[self._file.write(line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(end)
            raise self._refused(error) from error

    def sync(self) -> int:
        """Put every line on the disk; how many bytes there are now."""
        try:
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise self._refused(error) from error

    def finish(self) -> None:
        """Close the file, once its lines are on the disk."""
        try:
            self.sync()
        finally:
            self._file.close()

    def _refused(self, error: OSError) -> StorageError:
        where = f"{self._path.parent.name}/{self._path.name}"
        return StorageError(
            "MRL-7001",
            f"{where} cannot be written: {error.strerror}.\n"
            "The run stops rather than train without a record.\n"
            "Free some space or choose another run.dir, then run the same command again.",
        )


def read_ledger(path: Path) -> list[StepRecord]:
    """The records in file order. A last line without its end of line was never finished and is left out."""
    where = f"{path.parent.name}/{path.name}"
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError as error:
        raise MissingInputError("MRL-4901", f"{where} does not exist. Name the directory of a run.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            tree = json.loads(line)
            metrics = {name: number_from_json(value) for name, value in tree["metrics"].items()}
            records.append(StepRecord(int(tree["step"]), float(tree["time"]), metrics, tuple(tree.get("alerts", ()))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                "MRL-2901",
                f"{where}:{number} is not a step of a ledger: {line[:60].decode(errors='replace')!a}\n"
                'A line is {"step": number, "time": seconds, "metrics": {name: number}}.\n'
                "Remove the line.",
            ) from error
    return records


def rewind(path: Path, last_step: int) -> list[StepRecord]:
    """Cut off the lines after ``last_step`` and return the others.

    They are of steps that no checkpoint holds: the run will make those steps, and their lines, once more.
    """
    if not path.is_file():
        return []
    kept = [record for record in read_ledger(path) if record.step <= last_step]
    with open(path, "rb+") as file:
        file.truncate(sum(len(line) for line, _ in zip(file, kept, strict=False)))
        os.fsync(file.fileno())
    return kept


def _cut_torn_line(path: Path) -> None:
    if not path.is_file():
        return
    with open(path, "rb+") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)
