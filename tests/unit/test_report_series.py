"""Few points keep the shape of many: ends, spikes and gaps; numbers are short but true."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.report.series import Column, SeriesTable, evenly, number, stretch_means, thin

VALUES = st.lists(st.floats(width=32) | st.sampled_from([math.nan, math.inf, -math.inf]), min_size=1, max_size=400)
LIMITS = st.integers(8, 60)


@settings(deadline=None)
@given(VALUES, LIMITS)
def test_thinning_keeps_ends_extremes_and_order(values: list[float], limit: int) -> None:
    array = np.array(values)
    kept = thin(array, limit)
    assert len(kept) <= max(limit, 1)
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    assert np.all(np.diff(kept) > 0)
    finite = array[np.isfinite(array)]
    if len(finite):
        assert finite.min() in array[kept]
        assert finite.max() in array[kept]
    if len(finite) < len(array):
        assert not np.isfinite(array[kept]).all(), "a gap must stay visible"


@settings(deadline=None)
@given(VALUES, LIMITS)
def test_every_stretch_keeps_its_extremes(values: list[float], limit: int) -> None:
    """Between two neighbouring kept points nothing rises above or falls below what was kept around it."""
    array = np.nan_to_num(np.array(values), nan=0.0, posinf=1.0, neginf=-1.0)
    kept = thin(array, limit)
    size = -(-len(array) // ((limit - 2) // 2)) if len(array) > limit else 1
    for start in range(0, len(array), size):
        inside = kept[(kept >= start) & (kept < start + size)]
        assert array[start : start + size].min() == array[inside].min()
        assert array[start : start + size].max() == array[inside].max()


def test_few_points_stay_as_they_are() -> None:
    assert thin(np.array([3.0, math.nan, 1.0]), 8).tolist() == [0, 1, 2]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 50))
def test_means_of_stretches_keep_the_total(values: list[float], num_stretches: int) -> None:
    array = np.array(values)
    size = -(-len(array) // num_stretches)
    middles, means = stretch_means(array, num_stretches)
    lengths = np.diff(np.append(np.arange(0, len(array), size), len(array)))
    assert len(means) == len(lengths) <= num_stretches
    assert np.all(np.diff(middles) > 0)
    assert float(means @ lengths) == pytest.approx(float(array.sum()), abs=1e-3)


def test_means_pass_over_what_is_not_finite() -> None:
    middles, means = stretch_means(np.array([1.0, math.nan, math.inf, math.nan, 3.0, 5.0]), 3)
    assert means.tolist() == [1.0, 4.0]
    assert middles.tolist() == [1, 5]


def test_a_step_that_was_recorded_twice_counts_once() -> None:
    column = Column()
    for step, value in [(1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5), (4, 0.4)]:
        column.append(step, value)
    assert column.steps.tolist() == [1, 2, 3, 4]
    assert column.values.tolist() == [0.1, 0.5, 0.3, 0.4]


def test_series_share_their_steps_and_know_their_true_length() -> None:
    table = SeriesTable()
    short, long = Column(), Column()
    for step in range(5):
        short.append(10 + step, 1.0)
    for step in range(5000):
        long.append(step, math.sin(step))
    first, second, third = table.encode(short), table.encode(short), table.encode(long)
    assert first == second == {"x": 0, "y": [1, 1, 1, 1, 1]}
    assert table.grids[0] == [10, 1, 1, 1, 1]
    assert third["n"] == 5000
    assert len(third["y"]) <= 1000
    assert np.cumsum(table.grids[third["x"]])[-1] == 4999
    assert len(third["my"]) == len(table.grids[third["mx"]]) <= 250


@given(st.floats())
def test_numbers_are_short_and_near(value: float) -> None:
    written = number(value)
    if math.isfinite(value):
        assert written == pytest.approx(value, rel=1e-5, abs=1e-300)
        assert len(repr(written)) <= 19  # a sign, and 9.0e15 written out
    else:
        assert written == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]


def test_whole_numbers_are_exact() -> None:
    assert number(13_202_041.0) == 13_202_041


@given(st.lists(st.integers(), min_size=1), st.integers(2, 20))
def test_evenly_chosen_items_include_both_ends(items: list[int], limit: int) -> None:
    chosen = evenly(items, limit)
    assert len(chosen) == min(len(items), limit)
    assert (chosen[0], chosen[-1]) == (items[0], items[-1])
