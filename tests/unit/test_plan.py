"""The planner's promises, for any lengths and any plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megarl.data.plan import PackPlan, plan_minibatch

Plan = list[list[np.ndarray]]

budgets = st.integers(1, 600)
plans = st.builds(
    PackPlan,
    dp_size=st.integers(1, 8),
    num_minibatches=st.just(1),
    max_tokens_per_microbatch=budgets,
    same_count=st.booleans(),
    count_multiple=st.integers(1, 4),
    attention_cost=st.sampled_from([0.0, 1e-4, 0.01, 1.0]),
)
few = st.lists(st.integers(1, 300), min_size=1, max_size=60)
# repeated and drawn lengths: long lists that hypothesis does not have to invent number by number
many = st.builds(
    lambda seed, size, highest: np.random.default_rng(seed).integers(1, highest + 1, size).tolist(),
    st.integers(0, 1000),
    st.integers(1, 3000),
    st.integers(1, 300),
)
lists_of_lengths = st.one_of(few, many)


def costs_of(lengths: list[int], plan: PackPlan) -> np.ndarray:
    tokens = np.asarray(lengths, dtype=np.float64)
    return tokens + plan.attention_cost * tokens**2


def best_fit_count(lengths: list[int], budget: int) -> int:
    """Microbatches of best-fit decreasing, the slow way."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
            rooms.append(min(fitting) - length)
        else:
            rooms.append(max(0, budget - length))
    return len(rooms)


@given(lists_of_lengths, plans)
@settings(deadline=None)
def test_every_sequence_once_and_budgets_kept(lengths: list[int], plan: PackPlan) -> None:
    ranks = plan_minibatch(lengths, plan)
    assert len(ranks) == plan.dp_size
    microbatches = [microbatch for rank in ranks for microbatch in rank]
    assert sorted(np.concatenate(microbatches).tolist()) == list(range(len(lengths)))
    for microbatch in microbatches:
        num_tokens = sum(lengths[index] for index in microbatch)
        assert num_tokens <= plan.max_tokens_per_microbatch or len(microbatch) == 1


@given(lists_of_lengths, plans)
@settings(deadline=None)
@example([1] * 10, PackPlan(8, 1, 1, same_count=True))
@example([1] * 3, PackPlan(4, 1, 5, count_multiple=2))
def test_counts_are_allowed_and_fillers_few(lengths: list[int], plan: PackPlan) -> None:
    ranks = plan_minibatch(lengths, plan)
    counts = [len(rank) for rank in ranks]
    fillers = [sum(len(microbatch) == 0 for microbatch in rank) for rank in ranks]
    most = max(counts)
    assert all(count > 0 and count % plan.count_multiple == 0 for count in counts)
    if plan.same_count or len(lengths) >= plan.dp_size * most:
        assert set(counts) == {most}
    if len(lengths) >= plan.dp_size * most:
        assert not any(fillers)
    for rank, num_fillers in zip(ranks, fillers, strict=True):
        assert all(len(microbatch) for microbatch in rank[: len(rank) - num_fillers])
        if not plan.same_count:
            # one round of a pipeline at most, or the one microbatch that every rank must run
            assert num_fillers < plan.count_multiple or len(rank) == num_fillers == plan.count_multiple


@given(few, plans)
@settings(deadline=None)
def test_no_more_microbatches_than_best_fit_or_99_percent_need(lengths: list[int], plan: PackPlan) -> None:
    budget = plan.max_tokens_per_microbatch
    # 60 sequences: a hundredth of the microbatches is less than one, so best fit alone sets the limit
    step = plan.dp_size * plan.count_multiple
    limit = -(-best_fit_count(lengths, budget) // step) * plan.count_multiple
    assert max(len(rank) for rank in plan_minibatch(lengths, plan)) <= limit


@given(lists_of_lengths, plans)
@settings(deadline=None)
def test_ranks_cost_about_the_same(lengths: list[int], plan: PackPlan) -> None:
    costs = costs_of(lengths, plan)
    ranks = plan_minibatch(lengths, plan)
    grid = np.zeros((plan.dp_size, max(len(rank) for rank in ranks)))
    for row, rank in zip(grid, ranks, strict=True):
        row[: len(rank)] = [costs[microbatch].sum() for microbatch in rank]
    hands = np.sort(grid.ravel())[::-1].reshape(-1, plan.dp_size)
    loads = grid.sum(axis=1)
    # the second term: sums of float64 in another order than the planner's
    assert loads.max() - loads.min() <= (hands[:, 0] - hands[:, -1]).max() + 1e-9 * loads.max()


@given(lists_of_lengths, plans)
@settings(deadline=None, max_examples=30)
def test_only_lengths_and_the_cut_matter(lengths: list[int], plan: PackPlan) -> None:
    def as_lists(ranks: Plan) -> list[list[list[int]]]:
        return [[microbatch.tolist() for microbatch in rank] for rank in ranks]

    other = replace(plan, num_minibatches=7, loss_aggregation="sequence-mean-token-mean")
    assert plan.cuts_like(other)
    again = as_lists(plan_minibatch(np.array(lengths, dtype=np.int32), other))
    assert again == as_lists(plan_minibatch(lengths, plan))


def test_another_cut_is_not_alike() -> None:
    plan = PackPlan(2, 1, 100)
    for change in ({"dp_size": 1}, {"max_tokens_per_microbatch": 99}, {"same_count": True}, {"attention_cost": 0.1}):
        assert not plan.cuts_like(replace(plan, **change))


def long_tailed(num_sequences: int, budget: int, seed: int) -> list[int]:
    """Log-normal lengths with a mean of about an eighth of the budget, cut off at the budget."""
    drawn = np.random.default_rng(seed).lognormal(0.0, 1.0, num_sequences)
    return np.clip(drawn / drawn.mean() * budget / 8, 1, budget).astype(np.int64).tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dp_size", [1, 2, 8])
def test_a_long_tailed_batch_is_full_and_balanced(dp_size: int, seed: int) -> None:
    budget = 16384
    lengths = long_tailed(4096, budget, seed)
    plan = PackPlan(dp_size, 1, budget, same_count=True, attention_cost=1 / 49152)
    ranks = plan_minibatch(lengths, plan)
    num_microbatches = sum(len(rank) for rank in ranks)
    assert all(len(microbatch) for rank in ranks for microbatch in rank)
    assert sum(lengths) / (num_microbatches * budget) >= 0.97
    loads = [costs_of(lengths, plan)[np.concatenate(rank)].sum() for rank in ranks]
    assert max(loads) / np.mean(loads) <= 1.02


def test_microbatches_cost_the_same_where_the_budget_lets_them() -> None:
    """Few long sequences, twice as dear per token as the many short ones: those beside them must be fewer."""
    lengths = [2000] * 100 + [100] * 38_000
    plan = PackPlan(8, 1, 16384, count_multiple=64, attention_cost=1 / 2000)
    costs = costs_of(lengths, plan)
    of_microbatches = [costs[microbatch].sum() for rank in plan_minibatch(lengths, plan) for microbatch in rank]
    assert len(of_microbatches) == 512
    # one short sequence more or less: 105 of 8574. Equal numbers of tokens would give 1.18.
    assert max(of_microbatches) / np.mean(of_microbatches) < 1 + 105 / 8574


def test_a_multitude_of_small_sequences_is_poured_evenly() -> None:
    """More small sequences than largest-first places one by one, next to some that fill a microbatch alone."""
    lengths = np.random.default_rng(1).integers(1, 40, 20_000).tolist() + [100_000] * 3
    plan = PackPlan(2, 1, 100_000, attention_cost=1e-6)
    ranks = plan_minibatch(lengths, plan)
    assert sorted(np.concatenate([np.concatenate(rank) for rank in ranks]).tolist()) == list(range(len(lengths)))
    sums = [sum(lengths[index] for index in microbatch) for rank in ranks for microbatch in rank]
    assert max(sums) == 100_000
    small = sorted(sums)[:-3]
    assert len(sums) == 8  # seven are needed
    # the last sequences placed are the shortest, of one token
    assert max(small) - min(small) <= 2


@pytest.mark.parametrize("num_sequences", range(60, 70))
def test_any_number_of_sequences_fits_into_one_microbatch(num_sequences: int) -> None:
    """65 of them leave one for the bulk, which has no half."""
    ((microbatch,),) = plan_minibatch([10] * num_sequences, PackPlan(1, 1, 4096))
    assert sorted(microbatch.tolist()) == list(range(num_sequences))


@pytest.mark.parametrize(
    "wrong",
    [{"dp_size": 0}, {"count_multiple": 0}, {"attention_cost": -1.0}, {"attention_cost": float("nan")}],
)
def test_wrong_plans_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        replace(PackPlan(1, 1, 100), **wrong)
    with pytest.raises(ValueError, match="loss_aggregation"):
        PackPlan(1, 1, 100, "sum")  # type: ignore[arg-type]
