"""Reading a ledger while it is being written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.trackers.json_numbers import number_from_json


class LedgerRewound(Exception):
    """What was read is no longer there: the run was resumed from a checkpoint before it."""


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that a health rule noticed."""

    rule: str
    severity: int
    message: str


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """A step of a ledger. ``checksum`` tells it from the same step made anew."""

    step: int
    time: float
    metrics: dict[str, float]
    alerts: tuple[Alert, ...]
    checksum: int


class LedgerTail:
    """Gives every whole line once, in order. A last line without its end is left for later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""

    def read(self) -> Iterator[LedgerLine]:
        """The lines that were added since the last time. Raises `LedgerRewound` if earlier ones have changed."""
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                raise LedgerRewound
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self._last = line
                yield _parse(line)


def _parse(line: bytes) -> LedgerLine:
    tree: dict[str, Any] = json.loads(line)
    metrics = {name: number_from_json(value) for name, value in tree["metrics"].items()}
    alerts = tuple(Alert(str(a["rule"]), int(a["severity"]), str(a["message"])) for a in tree.get("alerts", ()))
    return LedgerLine(int(tree["step"]), float(tree["time"]), metrics, alerts, zlib.crc32(line))
