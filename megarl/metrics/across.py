"""How one metric's statistics from all ranks become numbers, for many metrics at once.

Each function takes the statistics of one kind, ``block[rank, metric, field]``, and ``present[rank, metric]``; a rank
that does not have a metric fills its row with the identity; ``places[rank]`` says which device and node it is on. It
returns, per suffix of the metric's name, the values and which of them exist. Rows are in rank order and row 0 is the
driver's, so results do not depend on who arrived first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.core.world import Place

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Columns = dict[str, tuple[Floats, Flags]]

# Up to so many devices are shown one by one; of more, trackers get summaries, and phases get percentiles over ranks.
MAX_DEVICES_SHOWN = 16


def _anywhere(present: Flags) -> Flags:
    return np.asarray(present.any(axis=0), dtype=np.bool_)


def _mean(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    num, den = block.sum(axis=0).T
    return {"": (num / den, _anywhere(present) & (den != 0))}


def _sum(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    return {"": (block[:, :, 0].sum(axis=0), _anywhere(present))}


def _node_sum(block: Floats, present: Flags, places: Sequence[Place]) -> Columns:
    nodes = np.array([place.node for place in places])
    sums = np.zeros((nodes.max() + 1, block.shape[1]))
    np.add.at(sums, nodes, np.where(present, block[:, :, 0], 0.0))
    return {"": (sums.max(axis=0), _anywhere(present))}


def _max(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    largest = block[:, :, 0].max(axis=0)
    return {"": (largest, _anywhere(present) & (largest != -np.inf))}


def _min(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    smallest = block[:, :, 0].min(axis=0)
    return {"": (smallest, _anywhere(present) & (smallest != np.inf))}


def _last(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    lowest_rank = present.argmax(axis=0)
    return {"": (block[lowest_rank, np.arange(block.shape[1]), 0], _anywhere(present))}


def _loss(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    total = block[:, :, 0].sum(axis=0)
    num_updates = block[:, :, 1].max(axis=0)
    return {"": (total / num_updates, _anywhere(present) & (num_updates != 0))}


def _gauge(block: Floats, present: Flags, places: Sequence[Place]) -> Columns:
    return {f"/{places[rank].device}": (block[rank, :, 0], present[rank]) for rank in range(len(block))}


def _span(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    totals = np.where(present, block[:, :, 3], -np.inf)
    slowest_rank = totals.argmax(axis=0)
    exists = _anywhere(present)
    metrics = np.arange(block.shape[1])
    onload, execute, offload, total = block[slowest_rank, metrics].T
    fastest = np.where(present, block[:, :, 3], np.inf).min(axis=0)
    columns = {"total": total, "execute": execute, "onload": onload, "offload": offload, "skew": total - fastest}
    if len(block) > MAX_DEVICES_SHOWN:
        columns |= _percentiles(totals, present.sum(axis=0))
    return {f"/{part}": (seconds, exists) for part, seconds in columns.items()}


def _percentiles(totals: Floats, num_present: NDArray[np.int64]) -> dict[str, Floats]:
    """The median and the 99th percentile over ranks, each one the reading of a real rank. Absent ranks are -inf."""
    num_ranks = len(totals)
    rows = np.arange(totals.shape[1])
    places = {
        f"p{p}": np.minimum(num_ranks - num_present + np.ceil(num_present * p / 100).astype(np.int64), num_ranks) - 1
        for p in (50, 99)
    }
    wanted = np.unique(np.concatenate(list(places.values())))
    ordered = np.partition(np.ascontiguousarray(totals.T), wanted, axis=1)  # in order at these places only
    return {name: ordered[rows, place] for name, place in places.items()}


def _variance(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    n, mean, m2 = (block[:, :, field] for field in range(3))
    count = n.sum(axis=0)
    center = (n * mean).sum(axis=0) / count
    squares = m2.sum(axis=0) + (n * (mean - center) ** 2).sum(axis=0)
    return {"": (squares / count, _anywhere(present) & (count != 0))}


def _driver_sum(block: Floats, present: Flags, _: Sequence[Place]) -> Columns:
    return {"": (block[0, :, 0], present[0])}


ACROSS: dict[str, Callable[[Floats, Flags, Sequence[Place]], Columns]] = {
    "mean": _mean,
    "sum": _sum,
    "node_sum": _node_sum,
    "max": _max,
    "min": _min,
    "last": _last,
    "loss": _loss,
    "gauge": _gauge,
    "span": _span,
    "moments": _variance,
    "driver_sum": _driver_sum,
}
