"""Where each metric sits in the vector of float64 that ranks send to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from megarl.core.world import Place
from megarl.metrics.across import ACROSS
from megarl.metrics.values import KINDS, Statistic


class Schema:
    """An agreed list of (name, kind). Ranks with equal schemas can add their vectors row by row.

    The vector holds the fields of all metrics, grouped by kind and sorted by name, then one flag per metric that says
    whether the rank has it. The flag tells a total of 0 from no total at all.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self.kinds = dict(sorted(kinds.items(), key=lambda item: (item[1], item[0])))
        identities = [_fields(KINDS[kind]()) for kind in self.kinds.values()]
        self._identity = np.array([x for fields in identities for x in fields], dtype=np.float64)
        starts = np.cumsum([0] + [len(fields) for fields in identities])
        self._slot = {name: slice(starts[i], starts[i + 1]) for i, name in enumerate(self.kinds)}

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return len(self._identity) + len(self.kinds)

    def covers(self, statistics: Mapping[str, Statistic]) -> bool:
        """Whether every statistic has its place here, with its kind."""
        return all(self.kinds.get(name) == statistic.kind for name, statistic in statistics.items())

    def extended(self, kinds: Iterable[tuple[str, str]]) -> Schema:
        """This schema with more metrics. One name with two kinds is a TypeError.

        Names are never dropped, so that a metric that comes and goes (evaluation) needs one agreement and no more.
        """
        union = dict(self.kinds)
        for name, kind in kinds:
            if union.setdefault(name, kind) != kind:
                raise TypeError(f"metric {name!r} is a {union[name]} on one rank and a {kind} on another")
        return Schema(union)

    def pack(self, statistics: Mapping[str, Statistic]) -> NDArray[np.float64]:
        """The vector of one rank, which must be covered."""
        fields = self._identity.copy()
        for name, statistic in statistics.items():
            fields[self._slot[name]] = _fields(statistic)
        flags = np.array([name in statistics for name in self.kinds], dtype=np.float64)
        return np.concatenate([fields, flags])

    def merge(self, rows: NDArray[np.float64], places: Sequence[Place] = ()) -> dict[str, float]:
        """The metrics of the step from all ranks' vectors, ``rows[rank]``, sorted by name; plain floats.

        Without ``places`` all ranks are on one node, and a device has its rank's number.
        """
        places = places or [Place(rank, 0) for rank in range(len(rows))]
        fields, present = rows[:, : len(self._identity)], rows[:, len(self._identity) :] != 0
        merged: dict[str, float] = {}
        column = 0
        for kind, group in groupby(self.kinds, key=self.kinds.__getitem__):
            names = list(group)
            block = fields[:, self._slot[names[0]].start : self._slot[names[-1]].stop]
            flags = present[:, column : column + len(names)]
            column += len(names)
            # An empty mask gives 0 / 0, a broken step inf - inf: the first is left out, the second is reported.
            with np.errstate(all="ignore"):
                columns = ACROSS[kind](block.reshape(len(rows), len(names), -1), flags, places)
            for suffix, (values, exists) in columns.items():
                readings = zip(names, values.tolist(), exists.tolist(), strict=True)
                merged.update((name + suffix, value) for name, value, here in readings if here)
        return dict(sorted(merged.items()))


def _fields(statistic: Statistic) -> list[float]:
    return [getattr(statistic, field) for field in statistic.__slots__]
