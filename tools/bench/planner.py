"""How fast and how well minibatches are planned: ``python tools/bench/planner.py [--rounds 10]``.

Long-tailed batches: log-normal lengths (sigma 1) with a mean of an eighth of the token budget, cut off at the budget.
Printed are the best CPU time of some rounds, the useful fraction (real tokens / (microbatches x budget), over all
ranks), the most expensive rank over the mean rank, the most expensive microbatch over the mean one, and the number of
filler microbatches.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from megarl.data.plan import PackPlan, plan_minibatch

BUDGET = 16384
# the attention of a model with hidden size 4096: as expensive as its linear layers at 49,152 tokens
ATTENTION_COST = 1 / (12 * 4096)


def long_tailed(num_sequences: int, seed: int) -> list[int]:
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.0, num_sequences)
    lengths: list[int] = np.clip(drawn / drawn.mean() * BUDGET / 8, 1, BUDGET).astype(np.int64).tolist()
    return lengths


def measure(lengths: list[int], plan: PackPlan, num_rounds: int) -> str:
    best = np.inf
    for _ in range(num_rounds):
        start = time.process_time()
        ranks = plan_minibatch(lengths, plan)
        best = min(best, time.process_time() - start)
    tokens = np.asarray(lengths, dtype=np.float64)
    costs = tokens + plan.attention_cost * tokens**2
    of_microbatch = [[costs[microbatch].sum() for microbatch in rank] for rank in ranks]
    of_rank = np.array([sum(rank) for rank in of_microbatch])
    flat = np.array([cost for rank in of_microbatch for cost in rank])
    useful = tokens.sum() / (len(flat) * plan.max_tokens_per_microbatch)
    num_fillers = sum(len(microbatch) == 0 for rank in ranks for microbatch in rank)
    return (
        f"{len(lengths):9,} {plan.dp_size:4} {len(flat):12,} {best * 1e3:8.1f} {useful:8.2%} "
        f"{of_rank.max() / of_rank.mean():9.4f} {flat.max() / flat.mean():9.3f} {num_fillers:7}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    num_rounds = parser.parse_args().rounds
    print("sequences   dp microbatches  best ms   useful  rank max    mb max  filler")
    for num_sequences in (4096, 65536):
        for dp_size in (1, 8, 64):
            plan = PackPlan(dp_size, 1, BUDGET, same_count=True, attention_cost=ATTENTION_COST)
            print(measure(long_tailed(num_sequences, seed=0), plan, num_rounds), flush=True)


if __name__ == "__main__":
    main()
