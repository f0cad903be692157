"""What k attempts at a task are worth: mean@k, std@k, best@k and worst@k, exactly.

best@k is the expected best of k attempts drawn *without replacement* from the n that were made; for 0/1 scores it is
the unbiased pass@k, and for k = n it is the true maximum. Standard deviations are of the population, at every level.

Other programs draw k attempts *with* replacement, a thousand times; `bootstrap_best_of` does as they do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

_NUM_DRAWS = 1000

# (the values, k) -> the best of k
BestOf = Callable[[Sequence[float], int], float]


def best_of(values: Sequence[float], k: int) -> float:
    """The mean of the maximum over all k-subsets: sum of x_i * C(i-1, k-1) / C(n, k) with x sorted upwards."""
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"best@{k} needs 1 <= k <= {n}, the number of attempts")
    subsets = math.comb(n, k)
    return math.fsum(x * (math.comb(i, k - 1) / subsets) for i, x in enumerate(sorted(values)))


def bootstrap_best_of(values: Sequence[float], k: int) -> float:
    """The mean of the maximum of k values drawn with replacement, from a generator of its own: the same each time."""
    drawn = np.random.default_rng(0).integers(0, len(values), (_NUM_DRAWS, k))
    return float(np.asarray(values, dtype=np.float64)[drawn].max(axis=1).mean())


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, std (population), max and min. One value has std 0."""
    mean = math.fsum(values) / len(values)
    variance = math.fsum((x - mean) ** 2 for x in values) / len(values)
    return {"mean": mean, "std": math.sqrt(variance), "max": max(values), "min": min(values)}


def standard_error(tasks: Sequence[Sequence[float]]) -> float:
    """How far the mean over tasks may be off because of which tasks they are: deviation of the tasks' means / √n."""
    means = [math.fsum(task) / len(task) for task in tasks]
    return spread(means)["std"] / math.sqrt(len(means))


def at_k(tasks: Sequence[Sequence[float]], detailed: bool = False, best: BestOf = best_of) -> dict[str, float]:
    """Statistics of ``tasks[i][j]``, the score of attempt j at task i: each per task, then the mean over tasks.

    Every task has the same number n of attempts; a failed attempt counts with its failure score, so that it cannot
    vanish from the average. Keys are mean@n, and for n > 1 std@n and best@k, worst@k for k = 2, 4, 8, ... and n.
    ``detailed`` adds {mean,std,max,min} over tasks of each. The worst of k is the best of k with the sign turned.
    """
    counts = {len(task) for task in tasks}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"every task needs the same number of attempts, at least one; got {sorted(counts)}")
    columns = [_of_task(task, best) for task in tasks]
    result: dict[str, float] = {}
    for name in columns[0]:
        over_tasks = spread([column[name] for column in columns])
        result[name] = over_tasks["mean"]
        if detailed:
            result.update((f"{name}/{statistic}", value) for statistic, value in over_tasks.items())
    return result


def _of_task(values: Sequence[float], best: BestOf) -> dict[str, float]:
    n = len(values)
    own = spread(values)
    column = {f"mean@{n}": own["mean"]}
    if n > 1:
        column[f"std@{n}"] = own["std"]
        powers_of_two = {2**i for i in range(1, n.bit_length()) if 2**i <= n}
        for k in sorted(powers_of_two | {n}):
            column[f"best@{k}"] = best(values, k)
            column[f"worst@{k}"] = -best([-x for x in values], k)
    return column
