"""What it costs the driver to merge the metrics of many ranks: ``python tools/bench/metrics_merge.py``.

4096 ranks with 64 series each: of all kinds, and all of them phases, of which each gets percentiles over ranks; beside
it as many numbers merged in the way of ROLL: dictionaries gathered into lists by name, then a reducer chosen by the
name's ending, percentiles among them. All in the same run, alternating; the median of each is shown. (A reading per
device is not merged but named, once for each device.)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megarl.core.world import Place
from megarl.metrics.meter import Meter
from megarl.metrics.schema import Schema

NUM_ROUNDS = 15
# the reducers of ROLL, by the ending of a name
REDUCERS: dict[str, Callable[[list[float]], float]] = {
    "_mean": lambda values: float(np.mean(values)),
    "_max": lambda values: float(np.max(values)),
    "_min": lambda values: float(np.min(values)),
    "_sum": lambda values: float(np.sum(values)),
    "_std": lambda values: float(np.std(values)),
    "_p50": lambda values: float(np.percentile(values, 50)),
    "_p99": lambda values: float(np.percentile(values, 99)),
}


def meter_of(rank: int, num_series: int, rng: np.random.Generator) -> Meter:
    """One rank's step: as many series of each of the eight kinds that ranks have."""
    meter = Meter()
    for number, x in enumerate(rng.random(num_series)):
        kind = number % 8
        if kind == 0:
            meter.mean(f"mean_{number}", x * rank, rank + 1)
        elif kind == 1:
            meter.sum(f"sum_{number}", x)
        elif kind == 2:
            meter.max(f"max_{number}", x)
        elif kind == 3:
            meter.min(f"min_{number}", x)
        elif kind == 4:
            meter.loss(f"loss_{number}", x, num_updates=2)
        elif kind == 5:
            meter.moments(f"moments_{number}", 10, x, x * x)
        elif kind == 6:
            meter.span(f"time/a/{number}", x, 2 * x, x, 4 * x)
        else:
            meter.node_sum(f"node_{number}", x)
    return meter


def phases_of(num_series: int, rng: np.random.Generator) -> Meter:
    """One rank's times in as many phases."""
    meter = Meter()
    for number, x in enumerate(rng.random(num_series)):
        meter.span(f"time/a/{number}", x, 2 * x, x, 4 * x)
    return meter


def vectors(meters: list[Meter]) -> tuple[Schema, NDArray[np.float64]]:
    """What the driver has when all ranks' messages are in."""
    schema = Schema({}).extended((name, one.kind) for name, one in meters[0].statistics.items())
    return schema, np.stack([schema.pack(meter.statistics) for meter in meters])


def roll_style(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Gather by name, reduce by the name's ending."""
    gathered: dict[str, list[float]] = defaultdict(list)
    for metrics in ranks:
        for name, value in metrics.items():
            gathered[name].append(value)
    ending = {name: next((end for end in REDUCERS if name.endswith(end)), "_mean") for name in gathered}
    return {name: REDUCERS[ending[name]](values) for name, values in gathered.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--series", type=int, default=64)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    schema, rows = vectors([meter_of(rank, options.series, rng) for rank in range(options.ranks)])
    phases, phase_rows = vectors([phases_of(options.series, rng) for _ in range(options.ranks)])
    places = [Place(rank, rank // 8) for rank in range(options.ranks)]
    endings = list(REDUCERS)
    plain = [
        {f"series_{i}{endings[i % len(endings)]}": float(x) for i, x in enumerate(rng.random(options.series))}
        for _ in range(options.ranks)
    ]
    merges: dict[str, Callable[[], object]] = {
        "megarl, all kinds": lambda: schema.merge(rows, places),
        "megarl, phases with percentiles": lambda: phases.merge(phase_rows, places),
        "ROLL style": lambda: roll_style(plain),
    }
    seconds: dict[str, list[float]] = {name: [] for name in merges}
    for _ in range(NUM_ROUNDS):
        for name, merge in merges.items():
            start = time.perf_counter()
            merge()
            seconds[name].append(time.perf_counter() - start)
    print(f"{options.ranks} ranks x {options.series} series")
    for name, values in seconds.items():
        print(f"  {name:<32} {1000 * statistics.median(values):8.2f} ms")


if __name__ == "__main__":
    main()
