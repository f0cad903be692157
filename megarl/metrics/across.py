"""How one metric's statistics from all ranks become numbers, for many metrics at once.

Each function takes the statistics of one kind, ``block[rank, metric, field]``, and ``present[rank, metric]``; a rank
that does not have a metric fills its row with the identity. It returns, per suffix of the metric's name, the values and
which of them exist. Rows are in rank order and row 0 is the driver's, so results do not depend on who arrived first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Columns = dict[str, tuple[Floats, Flags]]


def _anywhere(present: Flags) -> Flags:
    return np.asarray(present.any(axis=0), dtype=np.bool_)


def _mean(block: Floats, present: Flags) -> Columns:
    num, den = block.sum(axis=0).T
    return {"": (num / den, _anywhere(present) & (den != 0))}


def _sum(block: Floats, present: Flags) -> Columns:
    return {"": (block[:, :, 0].sum(axis=0), _anywhere(present))}


def _max(block: Floats, present: Flags) -> Columns:
    largest = block[:, :, 0].max(axis=0)
    return {"": (largest, _anywhere(present) & (largest != -np.inf))}


def _min(block: Floats, present: Flags) -> Columns:
    smallest = block[:, :, 0].min(axis=0)
    return {"": (smallest, _anywhere(present) & (smallest != np.inf))}


def _last(block: Floats, present: Flags) -> Columns:
    lowest_rank = present.argmax(axis=0)
    return {"": (block[lowest_rank, np.arange(block.shape[1]), 0], _anywhere(present))}


def _loss(block: Floats, present: Flags) -> Columns:
    total = block[:, :, 0].sum(axis=0)
    num_updates = block[:, :, 1].max(axis=0)
    return {"": (total / num_updates, _anywhere(present) & (num_updates != 0))}


def _gauge(block: Floats, present: Flags) -> Columns:
    # One process drives one device, so the rank is the device's number in the whole run.
    return {f"/{rank}": (block[rank, :, 0], present[rank]) for rank in range(len(block))}


def _span(block: Floats, present: Flags) -> Columns:
    totals = block.sum(axis=2)
    slowest_rank = np.where(present, totals, -np.inf).argmax(axis=0)
    exists = _anywhere(present)
    metrics = np.arange(block.shape[1])
    onload, execute, offload = block[slowest_rank, metrics].T
    total = totals[slowest_rank, metrics]
    fastest = np.where(present, totals, np.inf).min(axis=0)
    columns = {"total": total, "execute": execute, "onload": onload, "offload": offload, "skew": total - fastest}
    return {f"/{part}": (seconds, exists) for part, seconds in columns.items()}


def _variance(block: Floats, present: Flags) -> Columns:
    n, mean, m2 = (block[:, :, field] for field in range(3))
    count = n.sum(axis=0)
    center = (n * mean).sum(axis=0) / count
    squares = m2.sum(axis=0) + (n * (mean - center) ** 2).sum(axis=0)
    return {"": (squares / count, _anywhere(present) & (count != 0))}


def _driver_sum(block: Floats, present: Flags) -> Columns:
    return {"": (block[0, :, 0], present[0])}


ACROSS: dict[str, Callable[[Floats, Flags], Columns]] = {
    "mean": _mean,
    "sum": _sum,
    "max": _max,
    "min": _min,
    "last": _last,
    "loss": _loss,
    "gauge": _gauge,
    "span": _span,
    "moments": _variance,
    "driver_sum": _driver_sum,
}
