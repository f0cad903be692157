"""The notebook of one rank for one training step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import SupportsFloat

from megarl.metrics.values import (
    DriverSum,
    Gauge,
    Last,
    Loss,
    Max,
    Mean,
    Min,
    Moments,
    NodeSum,
    Span,
    Statistic,
    Sum,
)


class Meter:
    """Collects statistics by name. A name keeps the kind it was first used with; another kind is a TypeError.

    Numbers may be anything that ``float`` takes, a 0-d tensor included.
    """

    def __init__(self) -> None:
        self._statistics: dict[str, Statistic] = {}

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        """What was collected, by name; read-only."""
        return MappingProxyType(self._statistics)

    def mean(self, name: str, num: SupportsFloat, den: SupportsFloat) -> None:
        """Add to both sides of num / den. A total denominator of 0 leaves the metric out."""
        self._add(name, Mean(float(num), float(den)))

    def sum(self, name: str, x: SupportsFloat) -> None:
        """Add to a total over all ranks."""
        self._add(name, Sum(float(x)))

    def node_sum(self, name: str, x: SupportsFloat) -> None:
        """Read something of this rank that adds up over its node; of several readings the largest counts."""
        self._add(name, NodeSum(float(x)))

    def max(self, name: str, x: SupportsFloat) -> None:
        """Take the larger. -inf (the maximum of nothing) leaves the metric out."""
        self._add(name, Max(float(x)))

    def min(self, name: str, x: SupportsFloat) -> None:
        """Take the smaller. +inf (the minimum of nothing) leaves the metric out."""
        self._add(name, Min(float(x)))

    def last(self, name: str, x: SupportsFloat) -> None:
        """Replace the value."""
        self._add(name, Last(float(x), 1.0))

    def loss(self, name: str, partial: SupportsFloat, num_updates: int = 0) -> None:
        """Add a microbatch's share of its optimizer step's loss, and count optimizer steps as they are made."""
        self._add(name, Loss(float(partial), float(num_updates)))

    def moments(self, name: str, n: SupportsFloat, mean: SupportsFloat, m2: SupportsFloat) -> None:
        """Add ``n`` numbers by their mean and their squared deviations from it; reported is the population variance."""
        self._add(name, Moments(float(n), float(mean), float(m2)))

    def gauge(self, name: str, value: SupportsFloat) -> None:
        """Read this rank's device; it is reported as ``name/{device}``."""
        self._add(name, Gauge(float(value)))

    def span(
        self, name: str, onload_seconds: float, execute_seconds: float, offload_seconds: float, total_seconds: float
    ) -> None:
        """Add one pass through a phase; it is reported as ``name/{total,execute,onload,offload,skew}``."""
        self._add(name, Span(onload_seconds, execute_seconds, offload_seconds, total_seconds))

    def driver_sum(self, name: str, x: SupportsFloat) -> None:
        """Add to a total that every rank may keep but only the driver reports."""
        self._add(name, DriverSum(float(x)))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's wall seconds. All ranks may run the block; the driver's clock counts."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.driver_sum(name, time.monotonic() - start)

    def merge(self, later: Meter) -> None:
        """Take in what the same rank collected elsewhere, later in the same step."""
        for name, statistic in later.statistics.items():
            self._add(name, statistic)

    def _add(self, name: str, later: Statistic) -> None:
        earlier = self._statistics.get(name)
        if earlier is None:
            self._statistics[name] = later
        elif type(earlier) is type(later):
            self._statistics[name] = earlier.merge(later)  # type: ignore[arg-type]  # the line above made the types equal
        else:
            raise TypeError(f"metric {name!r} is a {earlier.kind} and cannot also be a {later.kind}")
