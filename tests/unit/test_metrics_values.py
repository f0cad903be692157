"""Statistics merge like the data that they stand for, and meters keep one kind per name."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.metrics.meter import Meter
from megarl.metrics.schema import Schema
from megarl.metrics.values import KINDS, Gauge, Max, Mean, Min, Moments, Statistic

# Multiples of 1/8 of moderate size: their sums are exact in float64, so that order cannot hide behind rounding.
EXACT = st.integers(-800, 800).map(lambda i: i / 8)
WEIGHT = st.integers(0, 50).map(float)


def step_value(*meters: Meter) -> dict[str, float]:
    """What the driver would report if each meter were one rank's."""
    schema = Schema({}).extended((name, stat.kind) for meter in meters for name, stat in meter.statistics.items())
    return schema.merge(np.stack([schema.pack(meter.statistics) for meter in meters]))


@st.composite
def statistics_of_one_kind(draw: st.DrawFn, num: int) -> list[Statistic]:
    kind = draw(st.sampled_from(sorted(KINDS)))
    if kind == "moments":  # only moments of real data are moments
        batches = draw(st.lists(st.lists(EXACT, min_size=1, max_size=5), min_size=num, max_size=num))
        return [moments_of(batch) for batch in batches]
    num_fields = len(KINDS[kind].__slots__)
    counts = {"last": 1, "loss": 1}.get(kind, num_fields)
    fields = st.tuples(*[EXACT if i < counts else WEIGHT for i in range(num_fields)])
    return [KINDS[kind](*draw(fields)) for _ in range(num)]


def moments_of(batch: list[float]) -> Moments:
    mean = sum(batch) / len(batch)
    return Moments(float(len(batch)), mean, sum((x - mean) ** 2 for x in batch))


def fields(statistic: Statistic) -> list[float]:
    return [getattr(statistic, field) for field in statistic.__slots__]


# Moments divide, so they are associative up to rounding; everything else is exact.
def same(a: Statistic, b: Statistic) -> bool:
    return fields(a) == pytest.approx(fields(b), rel=1e-9, abs=1e-9) if isinstance(a, Moments) else a == b


@given(statistics_of_one_kind(3))
def test_merging_is_associative(trio):
    a, b, c = trio
    assert same(a.merge(b).merge(c), a.merge(b.merge(c)))


@given(statistics_of_one_kind(2))
def test_merging_is_commutative_except_for_last(pair):
    a, b = pair
    if a.kind == "last":
        assert a.merge(b).x == (b.x if b.num_readings else a.x)
    else:
        assert same(a.merge(b), b.merge(a))


@given(statistics_of_one_kind(1))
def test_the_statistic_without_arguments_is_the_identity(single):
    (a,) = single
    identity = KINDS[a.kind]()
    assert fields(a.merge(identity)) == fields(a)
    if a.kind != "last" or a.num_readings:  # a Last without readings has no value to keep
        assert fields(identity.merge(a)) == fields(a)


@pytest.mark.parametrize("kind", [Max, Min, Gauge])
def test_extremes_keep_nan_from_either_side(kind):
    assert math.isnan(kind(math.nan).merge(kind(1.0)).x)
    assert math.isnan(kind(1.0).merge(kind(math.nan)).x)


@given(st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=30))
def test_values_do_not_depend_on_the_split_over_ranks_and_microbatches(tokens):
    """Each token is (x, microbatch, rank); one rank with everything in one microbatch must see the same numbers."""
    whole, ranks = Meter(), [Meter() for _ in range(3)]
    collect(whole, [x for x, _, _ in tokens], len(tokens))
    whole.loss("actor/pg_loss", 0.0, num_updates=1)
    for rank, meter in enumerate(ranks):
        for microbatch in range(4):
            collect(meter, [x for x, m, r in tokens if (m, r) == (microbatch, rank)], len(tokens))
        meter.loss("actor/pg_loss", 0.0, num_updates=1)
    expected, split = step_value(whole), step_value(*ranks)
    assert split.keys() == expected.keys()
    for name, value in expected.items():
        # The contract is 1e-6 relative; sums of up to 30 numbers of size 100 cancel to an absolute error near 1e-12,
        # and a variance squares them.
        assert split[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name


def collect(meter: Meter, xs: list[float], global_denominator: int) -> None:
    meter.mean("actor/entropy", sum(xs), len(xs))
    meter.sum("perf/total_num_tokens", len(xs))
    meter.max("actor/ratio_max", max(xs, default=-math.inf))
    meter.min("actor/ratio_min", min(xs, default=math.inf))
    meter.loss("actor/pg_loss", sum(xs) / global_denominator)
    mean = sum(xs) / len(xs) if xs else 0.0
    meter.moments("critic/returns/var", len(xs), mean, sum((x - mean) ** 2 for x in xs))


def test_a_loss_is_completed_per_optimizer_step_before_averaging():
    # Two optimizer steps with 1 and 3 tokens: step losses 4.0 and (1+2+3)/3 = 2.0. A token mean would say 2.5.
    ranks = [Meter(), Meter()]
    ranks[0].loss("actor/pg_loss", 4.0 / 1)
    for partial in (1.0 / 3, 2.0 / 3):
        ranks[0].loss("actor/pg_loss", partial)
    ranks[1].loss("actor/pg_loss", 3.0 / 3)
    for meter in ranks:
        meter.loss("actor/pg_loss", 0.0, num_updates=1)
        meter.loss("actor/pg_loss", 0.0, num_updates=1)
    assert step_value(*ranks)["actor/pg_loss"] == pytest.approx(3.0)  # thirds round in float64


def test_metrics_without_weight_are_left_out_and_zero_totals_are_not():
    meter = Meter()
    meter.mean("actor/entropy", 0.0, 0)
    meter.max("actor/ratio_max", -math.inf)
    meter.min("actor/ratio_min", math.inf)
    meter.moments("critic/returns/var", 0, 0.0, 0.0)
    meter.loss("actor/pg_loss", 0.0)
    meter.sum("weights/push_bytes", 0)
    assert step_value(meter) == {"weights/push_bytes": 0.0}


def test_nan_and_infinity_are_reported():
    bad, good = Meter(), Meter()
    for name, x in (("critic/score", math.nan), ("critic/rewards", math.inf)):
        for meter, value in ((bad, x), (good, 1.0)):
            meter.mean(f"{name}/mean", value, 1)
            meter.max(f"{name}/max", value)
    for order in ((bad, good), (good, bad)):
        step = step_value(*order)
        assert math.isnan(step["critic/score/mean"])
        assert math.isnan(step["critic/score/max"])
        assert step["critic/rewards/mean"] == step["critic/rewards/max"] == math.inf


def test_spans_report_the_slowest_rank_and_the_skew():
    ranks = [Meter(), Meter(), Meter()]
    ranks[0].span("time/actor_train/train_step", 5.0, 1.0, 0.0, 6.0)
    ranks[1].span("time/actor_train/train_step", 1.0, 3.0, 0.5, 4.5)
    ranks[1].span("time/actor_train/train_step", 1.0, 3.0, 0.5, 4.75)  # entered twice: adds up to 9.25
    assert step_value(*ranks) == {  # the third rank never entered the phase: it is not the fastest
        "time/actor_train/train_step/total": 9.25,
        "time/actor_train/train_step/execute": 6.0,
        "time/actor_train/train_step/onload": 2.0,
        "time/actor_train/train_step/offload": 1.0,
        "time/actor_train/train_step/skew": 3.25,
    }


def test_gauges_are_per_device_and_undiluted():
    ranks = [Meter(), Meter(), Meter()]
    ranks[0].gauge("memory/x/y/end/onload/max_allocated", 10.0)
    ranks[2].gauge("memory/x/y/end/onload/max_allocated", 70.0)
    ranks[2].gauge("memory/x/y/end/onload/max_allocated", 30.0)
    assert step_value(*ranks) == {
        "memory/x/y/end/onload/max_allocated/0": 10.0,
        "memory/x/y/end/onload/max_allocated/2": 70.0,
    }


def test_the_driver_keeps_its_own_clock_and_the_lowest_rank_has_the_last_word():
    ranks = [Meter(), Meter()]
    for seconds, meter in zip((1.0, 50.0), ranks, strict=True):
        meter.driver_sum("timing_s/gen", seconds)
        meter.driver_sum("timing_s/gen", seconds)
    ranks[1].last("actor/lr", 1e-6)
    ranks[1].last("actor/lr", 2e-6)
    assert step_value(*ranks) == {"actor/lr": 2e-6, "timing_s/gen": 2.0}


def test_timing_adds_up_even_when_the_block_fails():
    meter = Meter()
    with meter.timed("timing_s/gen"):
        pass
    first = meter.statistics["timing_s/gen"].x
    with pytest.raises(ZeroDivisionError), meter.timed("timing_s/gen"):
        1 / 0  # noqa: B018
    assert 0 <= first <= meter.statistics["timing_s/gen"].x


def test_one_name_has_one_kind():
    meter = Meter()
    meter.mean("actor/lr", 1.0, 1)
    with pytest.raises(TypeError, match=r"'actor/lr' is a mean and cannot also be a last"):
        meter.last("actor/lr", 1.0)
    other = Meter()
    other.sum("actor/lr", 1.0)
    with pytest.raises(TypeError, match="cannot also be a sum"):
        meter.merge(other)


def test_merging_meters_equals_collecting_in_one():
    one, first, second = Meter(), Meter(), Meter()
    collect(one, [1.0, 2.0], 3)
    collect(one, [5.0], 3)
    collect(first, [1.0, 2.0], 3)
    collect(second, [5.0], 3)
    first.merge(second)
    assert first.statistics == one.statistics


def test_tensors_and_numpy_scalars_become_plain_floats():
    meter = Meter()
    meter.mean("actor/entropy", torch.tensor(3.0), np.float32(2.0))
    meter.last("actor/lr", np.float64(0.5))
    assert meter.statistics["actor/entropy"] == Mean(3.0, 2.0)
    assert all(type(value) is float for value in step_value(meter).values())
