"""Which sequences are computed together, and on which data-parallel rank.

The plan of a minibatch depends on the lengths of its sequences and on the `PackPlan` alone, and always holds to this:

- every sequence is in exactly one microbatch;
- a microbatch keeps to the token budget, unless its only sequence exceeds it;
- all ranks run equally many microbatches, ``m``, a multiple of ``count_multiple``, as long as there are ``dp_size * m``
  sequences. Only when there are fewer does a microbatch stay empty; empty ones stand last in their rank's list, and
  are there only where the plan (`same_count`, `count_multiple`, or a rank without any sequence) needs them;
- ``m`` is no more than what best-fit decreasing, or else a fill of 99 %, needs;
- microbatches are dealt to the ranks by descending cost, one to each at a time, and the costs of two ranks differ by no
  more than those of two microbatches that were dealt at the same time.

Among such plans one is sought whose microbatches cost about the same, so that ranks and pipeline stages do not wait for
each other.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from megarl.config.algorithms import LossAggregation

_AGGREGATIONS = get_args(LossAggregation)
# Largest-first goes on one by one for so many rounds; what is left then is small, and is poured in bulk.
_EXACT_ROUNDS = 64
# How many sequences per microbatch, the smallest, level out what pouring left uneven.
_LEVELLING = 16

Integers: TypeAlias = NDArray[np.int64]
# costs, or numbers of tokens (which are exact up to 2**53)
Sizes: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PackPlan:
    """How a step is cut up. ``max_tokens_per_microbatch`` counts prompts too; a longer sequence travels alone."""

    dp_size: int
    num_minibatches: int
    max_tokens_per_microbatch: int
    loss_aggregation: LossAggregation = "token-mean"
    # All ranks must run equally many microbatches: with expert parallelism they meet inside every forward pass.
    same_count: bool = False
    # Every rank's number of microbatches must be a multiple of this: interleaved pipelines work in rounds.
    count_multiple: int = 1
    # A sequence of n tokens costs n + attention_cost * n**2.
    attention_cost: float = 0.0

    def __post_init__(self) -> None:
        sizes = (self.dp_size, self.num_minibatches, self.max_tokens_per_microbatch, self.count_multiple)
        if min(sizes) < 1 or not 0 <= self.attention_cost < math.inf:
            raise ValueError(f"sizes of a pack plan must be at least 1, and costs finite and not negative: {self}")
        if self.loss_aggregation not in _AGGREGATIONS:
            raise ValueError(f"loss_aggregation must be one of {_AGGREGATIONS}, not {self.loss_aggregation!r}")

    def cuts_like(self, other: PackPlan) -> bool:
        """Whether both give a minibatch to the same ranks in the same microbatches."""
        return self == replace(other, num_minibatches=self.num_minibatches, loss_aggregation=self.loss_aggregation)

    def round_up(self, num_microbatches: int) -> int:
        """The next number of microbatches, over all ranks, of which every rank can have an allowed and equal part."""
        step = self.dp_size * self.count_multiple
        return -(-num_microbatches // step) * step


def plan_minibatch(lengths: Sequence[int] | Integers, plan: PackPlan) -> list[list[Integers]]:
    """``[dp_rank][microbatch]``: indices into ``lengths`` (of one sequence at least). An empty list asks for filler.

    The module's docstring says what holds. A rank's microbatches come in descending order of cost.
    """
    sequences = np.asarray(lengths, dtype=np.int64)
    order = _descending(sequences)
    tokens = sequences[order]
    costs = tokens + plan.attention_cost * tokens.astype(np.float64) ** 2
    microbatch_of, num_microbatches = _fill_microbatches(tokens, costs, plan)
    indices = order[np.argsort(_narrow(microbatch_of), kind="stable")]
    edges = [0, *np.cumsum(np.bincount(microbatch_of, minlength=num_microbatches)).tolist()]
    microbatches = [indices[start:end] for start, end in pairwise(edges)]
    total_costs = np.bincount(microbatch_of, weights=costs, minlength=num_microbatches).astype(np.float64)
    shares = [[microbatches[position] for position in share] for share in _deal(total_costs, plan.dp_size)]
    return [_with_allowed_count(share, plan) for share in shares]


def _fill_microbatches(tokens: Integers, costs: Sizes, plan: PackPlan) -> tuple[Integers, int]:
    """(microbatch of each sequence, number of microbatches over all ranks). Sequences come in descending order.

    Evenly filled microbatches are tried first, with 1 % of the budget to spare; best fit, which is slower and leaves an
    uneven rest but fills better, is the way out when lengths are too coarse for that.
    """
    budget = plan.max_tokens_per_microbatch
    # a sequence that exceeds the budget leaves no room, like one that meets it
    tokens = np.clip(tokens, 1, budget)
    at_least = -(-int(tokens.sum()) // budget)
    count = plan.round_up(at_least + at_least // 100)
    if count <= len(tokens):
        even = _even(tokens, costs, count, budget)
        if even is not None:
            return even, count
    packed = _best_fit(tokens, budget)
    needed = plan.round_up(int(packed.max()) + 1)
    # with fewer than what was just tried it would not be even either
    if needed > count or count > len(tokens):
        even = _even(tokens, costs, needed, budget)
        if even is not None:
            return even, needed
    return _split(packed, costs, min(needed, len(tokens))), needed


def _even(tokens: Integers, costs: Sizes, num_bins: int, budget: int) -> Integers | None:
    """Microbatches of equal cost or, if the budget does not let them, of equally many tokens; None if neither fits."""
    for sizes in (costs, tokens.astype(np.float64)):
        bins = _largest_first(sizes, num_bins)
        if np.bincount(bins, weights=tokens).max() <= budget:
            return bins
    return None


def _largest_first(sizes: Sizes, num_bins: int) -> Integers:
    """Bin of each item (in descending order of size) when each goes to the least loaded bin.

    Exact where items are large; the many small ones of a long list are poured in bulk, in proportion to the room that
    is left in the bins, and the smallest level the bins out.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    loads = np.zeros(num_bins)
    placed = _place(sizes, bins, loads, 0, _EXACT_ROUNDS)
    if placed < len(sizes):
        left = len(sizes) - placed
        end = max(placed + left // 2, len(sizes) - _LEVELLING * num_bins)
        if end > placed:  # of one item that is left there is no half
            _pour(sizes, bins, loads, slice(placed, end))
        _place(sizes, bins, loads, end, len(sizes))
    return bins


def _place(sizes: Sizes, bins: Integers, loads: Sizes, start: int, max_rounds: int) -> int:
    """Put items from ``start`` on into the least loaded bin, one after the other; returns where it stopped.

    A round places a whole run of items at once: item after item goes to the next bin in the order of their loads, until
    one of the bins that just grew would be the least loaded again.
    """
    for _ in range(max_rounds):
        if start == len(sizes):
            break
        candidates = np.flatnonzero(loads <= loads.min() + sizes[start])
        candidates = candidates[np.argsort(loads[candidates], kind="stable")][: len(sizes) - start]
        before = loads[candidates]
        after = before + sizes[start : start + len(candidates)]
        overtaken = before[1:] > np.minimum.accumulate(after)[:-1]
        num_placed = int(overtaken.argmax()) + 1 if overtaken.any() else len(candidates)
        bins[start : start + num_placed] = candidates[:num_placed]
        loads[candidates[:num_placed]] = after[:num_placed]
        start += num_placed
    return start


def _pour(sizes: Sizes, bins: Integers, loads: Sizes, items: slice) -> None:
    """Give every bin a run of items in proportion to its room. Runs are taken in an order that mixes all sizes."""
    count = items.stop - items.start
    # multiples of a number near the golden section of the count, modulo the count, visit every item once, evenly spread
    stride = next(step for step in range(int(0.618 * count) or 1, 2 * count + 2) if math.gcd(step, count) == 1)
    mixed = items.start + np.arange(count) * stride % count
    filled = np.cumsum(sizes[mixed])
    rooms = np.cumsum(np.maximum(sizes.sum() / len(loads) - loads, 0))
    # an item belongs to the bin in whose stretch of the poured total its middle lies
    middles = (filled - sizes[mixed] / 2) * (rooms[-1] / filled[-1])
    bins[mixed] = np.minimum(np.searchsorted(rooms, middles), len(loads) - 1)
    loads += np.bincount(bins[items], weights=sizes[items], minlength=len(loads))


def _best_fit(tokens: Integers, budget: int) -> Integers:
    """Bin of each item (in descending order) when each goes to the fullest bin that has room, or opens a new one."""
    bins: list[int] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), sorted
    num_bins = 0
    lengths, counts = np.unique(tokens, return_counts=True)
    for length, count in zip(lengths[::-1].tolist(), counts[::-1].tolist(), strict=True):
        left = count
        while left:
            position = bisect_left(rooms, (length, -1))
            if position == len(rooms):
                room, chosen = budget, num_bins
                num_bins += 1
            else:
                room, chosen = rooms.pop(position)
            # what remains of the tightest room is tighter still: equal items go on filling it
            num_items = min(left, room // length)
            bins.extend([chosen] * num_items)
            left -= num_items
            if room > num_items * length:
                insort(rooms, (room - num_items * length, chosen))
    return np.asarray(bins, dtype=np.int64)


def _split(bins: Integers, costs: Sizes, num_bins: int) -> Integers:
    """Halve the most expensive bins until there are ``num_bins`` (at most one per item)."""
    bins = bins.copy()
    totals = np.bincount(bins, weights=costs)
    num_items = np.bincount(bins)
    queue = [(-cost, position) for position, cost in enumerate(totals.tolist()) if num_items[position] > 1]
    heapq.heapify(queue)
    for new in range(len(totals), num_bins):
        _, old = heapq.heappop(queue)
        members = np.flatnonzero(bins == old)
        halves = _largest_first(costs[members], 2)
        bins[members[halves == 1]] = new
        for half, position in enumerate((old, new)):
            if (halves == half).sum() > 1:
                heapq.heappush(queue, (-float(costs[members[halves == half]].sum()), position))
    return bins


def _deal(costs: Sizes, dp_size: int) -> Integers:
    """``[dp_size, count]``: which microbatches each rank gets. Equally many each, in descending order of cost.

    One goes to every rank at a time, the most expensive of them to the rank with the least so far. That keeps two ranks
    no further apart than the most and the least expensive of one such hand are.
    """
    hands = np.argsort(-costs, kind="stable").reshape(-1, dp_size)
    if dp_size == 1:
        return hands.T
    shares = np.empty_like(hands)
    loads = np.zeros(dp_size)
    for number, hand in enumerate(hands):
        ranks = np.argsort(loads, kind="stable")
        shares[number, ranks] = hand
        loads[ranks] += costs[hand]
    return shares.T


def _with_allowed_count(share: list[Integers], plan: PackPlan) -> list[Integers]:
    """Without the empty microbatches that nothing asks for."""
    if plan.same_count:
        return share
    full = [microbatch for microbatch in share if len(microbatch)]
    count = -(-max(1, len(full)) // plan.count_multiple) * plan.count_multiple
    return share[:count]


def _descending(values: Integers) -> Integers:
    """Positions in descending order of value; equal ones keep their order."""
    return np.argsort(_narrow(values.max() - values), kind="stable")


def _narrow(values: Integers) -> NDArray[np.integer]:
    """The same numbers in 16 bits where they fit: numpy sorts those in linear time."""
    return values.astype(np.uint16) if values.max() < 2**16 else values
