"""What rules remember of a metric: a bounded number of values, whatever the length of the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from operator import mul
from statistics import fmean, median

TREND_STEPS = 50
# Two-sided 5 % point of Student's t with TREND_STEPS - 2 = 48 degrees of freedom.
_CRITICAL_T = 2.0106
# A rise over the window below this share of the values is rounding, not a rise.
_ROUNDING = 1e-9


class Early:
    """Observations number ``first`` to ``last`` of a metric. Once they are complete only two numbers are kept."""

    def __init__(self, first: int, last: int) -> None:
        self._num_to_skip = first - 1
        self._size = last - first + 1
        self._values: list[float] = []
        self.median: float | None = None
        self.mean: float | None = None

    def push(self, value: float) -> None:
        """Take in the next observation."""
        if self.median is not None:
            return
        if self._num_to_skip:
            self._num_to_skip -= 1
            return
        self._values.append(value)
        if len(self._values) == self._size:
            self.median, self.mean = median(self._values), fmean(self._values)
            self._values.clear()


class Trend:
    """Whether a metric improves: the slope over the last 50 steps is above 0 with p < 0.05."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=TREND_STEPS)

    def push(self, value: float) -> None:
        """Take in the next observation."""
        self._values.append(value)

    @property
    def improves(self) -> bool:
        """False as long as there are too few observations to tell."""
        return len(self._values) == TREND_STEPS and rises_significantly(self._values)


@cache
def _centred(count: int) -> tuple[float, ...]:
    """The step numbers of a window, shifted so that they add up to 0."""
    return tuple(index - (count - 1) / 2 for index in range(count))


def _sum_of_squares(count: int) -> float:
    """That of the centred step numbers."""
    return count * (count * count - 1) / 12


def slope(values: Sequence[float]) -> float:
    """Least squares, per step. Exactly 0 for what is flat up to rounding."""
    count = len(values)
    found = sum(map(mul, _centred(count), values)) / _sum_of_squares(count)
    rise = abs(found) * (count - 1)
    return found if rise > _ROUNDING * max(abs(max(values)), abs(min(values))) else 0.0


def rises_significantly(values: Sequence[float]) -> bool:
    """The t-test of the least-squares slope of TREND_STEPS values: slope / standard error above the critical t."""
    count = len(values)
    found = slope(values)
    mean = fmean(values)
    explained = found * found * _sum_of_squares(count)
    unexplained = max(math.fsum((value - mean) ** 2 for value in values) - explained, 0.0)
    return found > 0 and explained * (count - 2) > _CRITICAL_T**2 * unexplained


def halves_differ_by(values: Sequence[float]) -> float:
    """The median of the second half minus that of the first: a cheap sign of a slope, half a window long."""
    listed = list(values)
    half = len(listed) // 2
    return median(listed[-half:]) - median(listed[:half])


def robust_slope(values: Sequence[float]) -> float:
    """Theil and Sen, per step: the median slope of all pairs, which a few outliers do not move."""
    pairs = combinations(enumerate(values), 2)
    return median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)
