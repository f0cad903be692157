"""mean@k, std@k, best@k and worst@k against worked examples and against enumeration."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.metrics.at_k import at_k, best_of, bootstrap_best_of, spread
from megarl.metrics.throughput import Derivation, Hardware, TokenRate

# The worked example of the Trinity-RFT monitor reference: three tasks, two runs each.
TASKS = [[0.8, 0.9], [0.6, 0.9], [0.95, 0.85]]
# The reference prints four digits.
FOUR_DIGITS = 5e-5


def test_worked_example():
    expected = {"mean@2": 0.8333, "std@2": 0.0833, "best@2": 0.9167, "worst@2": 0.75}
    assert at_k(TASKS) == pytest.approx(expected, abs=FOUR_DIGITS)


def test_worked_example_in_detail():
    detailed = at_k(TASKS, detailed=True)
    assert detailed["mean@2"] == detailed["mean@2/mean"]
    over_tasks = {
        name: [detailed[f"{name}/{statistic}"] for statistic in ("mean", "std", "max", "min")]
        for name in ("mean@2", "std@2")
    }
    assert over_tasks["mean@2"] == pytest.approx([0.8333, 0.0624, 0.90, 0.75], abs=FOUR_DIGITS)
    assert over_tasks["std@2"] == pytest.approx([0.0833, 0.0471, 0.15, 0.05], abs=FOUR_DIGITS)


def test_one_attempt_has_no_spread_and_one_task_has_spread_zero():
    assert at_k([[1.0], [0.0]]) == {"mean@1": 0.5}
    assert spread([0.7])["std"] == 0.0


def test_attempt_counts_are_powers_of_two_and_all():
    assert [name for name in at_k([[0.0] * 6]) if name.startswith("best")] == ["best@2", "best@4", "best@6"]
    assert [name for name in at_k([[0.0] * 4]) if name.startswith("worst")] == ["worst@2", "worst@4"]


def test_best_of_is_unbiased_pass_at_k():
    assert best_of([0, 0, 0, 1], 4) == 1.0  # a bootstrap would say 0.684
    assert best_of([0, 0, 0, 1], 2) == 0.5


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=7), st.data())
def test_best_and_worst_equal_the_mean_over_all_subsets(values, data):
    k = data.draw(st.integers(1, len(values)))
    subsets = list(combinations(values, k))
    # At most 35 subsets of numbers up to 10: float64 rounding stays far below 1e-9.
    assert best_of(values, k) == pytest.approx(sum(map(max, subsets)) / len(subsets), abs=1e-9)
    if k == len(values) > 1:
        assert at_k([values])[f"worst@{k}"] == min(values)


def test_other_programs_draw_with_replacement():
    """The mean of the maximum of two draws from {0.8, 0.9} is 0.875, not 0.9; the same number each time."""
    assert bootstrap_best_of([0.8, 0.9], 2) == pytest.approx(0.875, abs=0.004)  # 1000 draws: deviation 0.0014
    assert at_k([[0.8, 0.9]], best=bootstrap_best_of) == at_k([[0.8, 0.9]], best=bootstrap_best_of)
    assert at_k([[0.8, 0.9]], best=bootstrap_best_of)["worst@2"] == pytest.approx(0.825, abs=0.004)


def test_impossible_requests_are_refused():
    with pytest.raises(ValueError, match="best@3 needs 1 <= k <= 2"):
        best_of([0.0, 1.0], 3)
    with pytest.raises(ValueError, match="same number of attempts"):
        at_k([[0.0, 1.0], [1.0]])
    with pytest.raises(ValueError, match="same number of attempts"):
        at_k([])


def test_speeds_of_the_explained_step():
    """The numbers of a published veRL step, to the digits printed there."""
    step = {
        "perf/total_num_tokens": 13_202_040,
        "perf/num_response_tokens": 5120 * 104.6,
        "timing_s/step": 1352.6,
        "timing_s/update_actor": 692.3,
        "timing_s/gen": 54.3,
        "timing_s/reward": 1.0,
    }
    derived = Derivation(Hardware(8)).derive(step)
    assert derived["perf/throughput"] == pytest.approx(1220.06, abs=0.005)
    assert derived["timing_per_token_ms/update_actor"] == pytest.approx(0.05244, abs=5e-6)
    assert derived["timing_per_token_ms/gen"] == pytest.approx(0.1014, abs=FOUR_DIGITS)
    assert "timing_per_token_ms/ref" not in derived
    assert "timing_per_token_ms/reward" not in derived
    total = derived["perf/throughput"] * 8 * derived["perf/time_per_step"]
    assert total == pytest.approx(step["perf/total_num_tokens"])


def test_a_step_without_tokens_or_time_has_no_speeds():
    assert Derivation().derive({"timing_s/gen": 1.0, "timing_s/step": 0.0}) == {"perf/time_per_step": 0.0}


def test_explained_variance():
    assert Derivation().derive({"critic/returns/var": 4.0, "critic/value_errors/var": 1.0}) == {
        "critic/vf_explained_var": pytest.approx(0.75, abs=1e-5)  # the constant in the denominator
    }


def test_token_rate_covers_five_steps():
    rate = TokenRate()
    assert rate.push(10, 0.0) is None
    assert rate.push(10, 2.0) == 10.0
    for _ in range(5):
        latest = rate.push(100, 1.0)
    assert latest == 100.0
