"""The rows of a file that cannot be used: located, counted, and never lost without a word."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megarl.core.errors import DataError

_MAX_REPORTS = 10


@dataclass(frozen=True, slots=True)
class BadRowPolicy:
    """``error``: any bad row ends the run. ``skip``: up to ``limit`` of them are left out."""

    action: Literal["error", "skip"] = "error"
    limit: int = 100


class RejectedRows:
    """Counts bad rows and keeps the first few reports."""

    def __init__(self, path: Path) -> None:
        self.num_rows = 0
        self._path = path
        self._reports: list[str] = []

    def add(self, report: str) -> None:
        """One more bad row."""
        self.num_rows += 1
        if len(self._reports) < _MAX_REPORTS:
            self._reports.append(report)

    def settle(self, num_good: int, policy: BadRowPolicy) -> str:
        """When all rows were seen: which were left out, to be shown once. Raises DataError when the policy says so."""
        num_bad, num_rows = self.num_rows, self.num_rows + num_good
        if num_rows == 0:
            raise DataError("MRL-2002", f"{self._path}: the file is empty. Give one JSON object per line.")
        if num_bad == 0:
            return ""
        more = [f"and {num_bad - len(self._reports)} more"] if num_bad > len(self._reports) else []
        listing = "\n  ".join([*self._reports, *more])
        count = f"{num_bad:,} bad {'row' if num_bad == 1 else 'rows'} of {num_rows:,}"
        if policy.action == "error":
            raise DataError(
                "MRL-2001", f"{listing}\n{count}. Fix them, or set data.bad_rows=skip (limit data.max_bad_rows)."
            )
        if num_good == 0:
            raise DataError("MRL-2002", f"{listing}\n{count}: nothing is left to train on.")
        if num_bad > policy.limit:
            raise DataError("MRL-2003", f"{listing}\n{count}, more than data.max_bad_rows={policy.limit}.")
        return f"{count} skipped:\n  {listing}"


class SeenIds:
    """Finds ids that occur twice in 16 bytes per id: their hashes are compared, then the ids themselves."""

    def __init__(self) -> None:
        self._hashes = array("q")
        self._rows = array("q")

    def add(self, row: int, row_id: str) -> None:
        """The id that the good row number ``row`` gives itself."""
        self._hashes.append(hash(row_id))
        self._rows.append(row)

    def candidates(self) -> Iterator[tuple[int, int]]:
        """(row, earlier row) for all pairs that seem to have one id; most likely they do. In the order of the rows."""
        hashes, rows = np.array(self._hashes), np.array(self._rows)
        order = np.argsort(hashes, kind="stable")
        same = hashes[order][1:] == hashes[order][:-1]
        starts = np.concatenate([[True], ~same]) if len(order) else np.zeros(0, dtype=bool)
        first = order[np.maximum.accumulate(np.where(starts, np.arange(len(order)), 0))]
        pairs = zip(rows[order].tolist(), rows[first].tolist(), strict=True)
        return iter(sorted((row, earlier) for row, earlier in pairs if row != earlier))
