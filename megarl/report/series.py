"""One metric over the steps, and how few points show it faithfully."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import NDArray

MAX_POINTS = 1000
_NUM_MEANS = 250
_EXACT = 2.0**53
# Nothing that is measured is larger, and sums of such numbers stay finite.
_LARGEST = 1e100

T = TypeVar("T")
Floats = NDArray[np.float64]
Steps = NDArray[np.int64]


class Column:
    """The values of one metric in the order of the ledger. Not every step needs to have one."""

    __slots__ = ("_steps", "_values")

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def append(self, step: int, value: float) -> None:
        """Take one step's value in."""
        self._steps.append(step)
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def steps(self) -> Steps:
        """Strictly ascending."""
        return self._tidy()[0]

    @property
    def values(self) -> Floats:
        """One for each of `steps`."""
        return self._tidy()[1]

    def _tidy(self) -> tuple[Steps, Floats]:
        """Of a step that was recorded twice, the later record counts."""
        steps = np.array(self._steps, dtype=np.int64)
        values = np.array(self._values, dtype=np.float64)
        values[np.abs(values) > _LARGEST] *= np.inf
        if len(steps) > 1 and np.any(np.diff(steps) <= 0):
            order = np.argsort(steps, kind="stable")
            is_last = np.append(np.diff(steps[order]) > 0, True)
            steps, values = steps[order][is_last], values[order][is_last]
        return steps, values


def thin(values: Floats, limit: int = MAX_POINTS) -> Steps:
    """Indices of at most ``limit`` points, ascending, that keep the shape.

    First and last point stay, and of every stretch the smallest, the largest and (where there is one) a non-finite
    value: no spike and no gap disappears.
    """
    if len(values) <= limit:
        return np.arange(len(values))
    is_finite = np.isfinite(values)
    num_kept = 2 if is_finite.all() else 3
    size = -(-len(values) // ((limit - 2) // num_kept))
    picks = [
        _smallest_of_stretches(np.where(is_finite, values, np.inf), size),
        _smallest_of_stretches(np.where(is_finite, -values, np.inf), size),
    ]
    kept = [pick[is_finite[pick]] for pick in picks]
    if num_kept == 3:
        pick = _smallest_of_stretches(is_finite.astype(np.float64), size)
        kept.append(pick[~is_finite[pick]])
    return np.unique(np.concatenate([*kept, [0, len(values) - 1]]))


def _smallest_of_stretches(keys: Floats, size: int) -> Steps:
    """The index of the smallest key of every stretch of ``size``."""
    padded = np.full(-(-len(keys) // size) * size, np.inf)
    padded[: len(keys)] = keys
    rows = padded.reshape(-1, size)
    found: Steps = np.argmin(rows, axis=1) + np.arange(len(rows)) * size
    return np.minimum(found, len(keys) - 1)


def stretch_means(values: Floats, num_stretches: int) -> tuple[Steps, Floats]:
    """The index in the middle of every stretch and the mean of its finite values, where it has any."""
    size = max(1, -(-len(values) // num_stretches))
    starts = np.arange(0, len(values), size)
    is_finite = np.isfinite(values)
    counts = np.add.reduceat(is_finite.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(is_finite, values, 0.0), starts)
    middles = np.minimum(starts + size // 2, len(values) - 1)
    return middles[counts > 0], sums[counts > 0] / counts[counts > 0]


class SeriesTable:
    """Columns as JSON. Step numbers are written once for all series that share them, as differences."""

    def __init__(self) -> None:
        self.grids: list[list[int]] = []
        self._grid_of: dict[bytes, int] = {}

    def encode(self, column: Column) -> dict[str, Any]:
        """``x`` names a grid, ``y`` are values; thinned series have their true length ``n`` and means of stretches."""
        steps, values = column.steps, column.values
        kept = thin(values)
        series: dict[str, Any] = {"x": self._grid(steps[kept]), "y": numbers(values[kept].tolist())}
        if len(kept) < len(values):
            middles, means = stretch_means(values, _NUM_MEANS)
            series["n"] = len(values)
            series["mx"], series["my"] = self._grid(steps[middles]), numbers(means.tolist())
        return series

    def _grid(self, steps: Steps) -> int:
        key = steps.tobytes()
        if key not in self._grid_of:
            self._grid_of[key] = len(self.grids)
            self.grids.append(np.diff(steps, prepend=0).tolist())
        return self._grid_of[key]


def evenly(items: list[T], limit: int) -> list[T]:
    """At most ``limit`` of them, the first and the last included."""
    if len(items) <= limit:
        return items
    return [items[index] for index in np.linspace(0, len(items) - 1, limit).round().astype(int)]


def is_number(value: object) -> TypeGuard[float]:
    """Whether something read from a file is a finite number of a size that can be meant."""
    return isinstance(value, (int, float)) and abs(value) <= _LARGEST


def are_numbers(values: Floats) -> NDArray[np.bool_]:
    """`is_number` of each."""
    return np.abs(values) <= _LARGEST


def numbers(values: Iterable[float]) -> list[float | str]:
    """`number` of each."""
    return [number(value) for value in values]


def number(value: float) -> float | str:
    """Six significant digits, more than a screen shows; whole numbers stay exact. Non-finite ones become text."""
    if value != value:  # quicker than math.isnan, and this runs for every point of the page
        return "NaN"
    if -_EXACT < value < _EXACT:
        whole = int(value)
        return whole if whole == value else float(f"{value:.6g}")
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.6g}")
