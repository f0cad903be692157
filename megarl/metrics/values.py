"""What a metric is made of: statistics that can be merged, never averages.

Invariants, for every kind:

* The statistic without arguments is the identity: merging it changes nothing.
* ``earlier.merge(later)`` merges two readings of *one rank* (microbatch into optimizer step into training step). It is
  associative, and commutative except for :class:`Last`.
* NaN and infinities are readings like any other; they are never dropped.

How readings of *different ranks* come together is another question, with another answer for some kinds (ranks share
their optimizer steps, they do not add them); `metrics.across` holds it.

The fields of a statistic are floats, in a fixed order: that order is how it travels (`metrics.schema`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, num / den. Without weight (an empty mask) it has no value."""

    kind: ClassVar[str] = "mean"
    num: float = 0.0
    den: float = 0.0

    def merge(self, later: Mean) -> Mean:
        return Mean(self.num + later.num, self.den + later.den)


@dataclass(frozen=True, slots=True)
class Sum:
    """A total over readings and ranks."""

    kind: ClassVar[str] = "sum"
    x: float = 0.0

    def merge(self, later: Sum) -> Sum:
        return Sum(self.x + later.x)


@dataclass(frozen=True, slots=True)
class NodeSum:
    """A reading of this rank that adds up over its node; the fullest node is reported. Of several the largest one."""

    kind: ClassVar[str] = "node_sum"
    x: float = -math.inf

    def merge(self, later: NodeSum) -> NodeSum:
        return NodeSum(_larger(self.x, later.x))


@dataclass(frozen=True, slots=True)
class Max:
    """The largest reading. -inf is what the maximum of an empty mask gives, and means: no value."""

    kind: ClassVar[str] = "max"
    x: float = -math.inf

    def merge(self, later: Max) -> Max:
        return Max(_larger(self.x, later.x))


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest reading. +inf is what the minimum of an empty mask gives, and means: no value."""

    kind: ClassVar[str] = "min"
    x: float = math.inf

    def merge(self, later: Min) -> Min:
        return Min(-_larger(-self.x, -later.x))


@dataclass(frozen=True, slots=True)
class Last:
    """The latest reading; ``num_readings`` 0 is the identity. Ranks are expected to agree: the lowest rank speaks."""

    kind: ClassVar[str] = "last"
    x: float = 0.0
    num_readings: float = 0.0

    def merge(self, later: Last) -> Last:
        return Last(later.x if later.num_readings else self.x, self.num_readings + later.num_readings)


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of an optimizer step, averaged over optimizer steps.

    Microbatches contribute partial sums that are already divided by the optimizer step's global denominator (with
    ``num_updates`` 0), so that each step's loss is complete before any averaging; whoever steps the optimizer
    contributes ``Loss(0.0, 1)``. Ranks add their partial sums and share their optimizer steps.
    """

    kind: ClassVar[str] = "loss"
    total: float = 0.0
    num_updates: float = 0.0

    def merge(self, later: Loss) -> Loss:
        return Loss(self.total + later.total, self.num_updates + later.num_updates)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A reading of this rank's device, reported per device. Of several the largest counts: gauges watch limits."""

    kind: ClassVar[str] = "gauge"
    x: float = -math.inf

    def merge(self, later: Gauge) -> Gauge:
        return Gauge(_larger(self.x, later.x))


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds that this rank spent in one phase; a phase entered twice adds. The slowest rank's is reported.

    The parts do not exceed the total, which also holds what lies between them (taking the readings).
    """

    kind: ClassVar[str] = "span"
    onload: float = 0.0
    execute: float = 0.0
    offload: float = 0.0
    total: float = 0.0

    def merge(self, later: Span) -> Span:
        return Span(
            self.onload + later.onload,
            self.execute + later.execute,
            self.offload + later.offload,
            self.total + later.total,
        )


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations (Welford, Chan): a variance without cancellation."""

    kind: ClassVar[str] = "moments"
    n: float = 0.0
    mean: float = 0.0
    m2: float = 0.0

    def merge(self, later: Moments) -> Moments:
        if not self.n or not later.n:  # the identity is exact, not merely up to rounding
            return later if later.n else self
        n = self.n + later.n
        shift = later.mean - self.mean
        return Moments(n, self.mean + shift * later.n / n, self.m2 + later.m2 + shift * shift * self.n * later.n / n)


@dataclass(frozen=True, slots=True)
class DriverSum:
    """A total that every rank may keep but only the driver's counts: wall times, events that all ranks see alike."""

    kind: ClassVar[str] = "driver_sum"
    x: float = 0.0

    def merge(self, later: DriverSum) -> DriverSum:
        return DriverSum(self.x + later.x)


Statistic = Mean | Sum | NodeSum | Max | Min | Last | Loss | Gauge | Span | Moments | DriverSum
KINDS: dict[str, type[Statistic]] = {
    kind.kind: kind for kind in (Mean, Sum, NodeSum, Max, Min, Last, Loss, Gauge, Span, Moments, DriverSum)
}


def _larger(a: float, b: float) -> float:
    """``max`` that keeps NaN whichever side it is on; the built-in depends on the order."""
    return a if a > b or math.isnan(a) else b
