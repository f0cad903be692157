"""The engine against the trainer: gaps, tails, growth with the position, and whose gap it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from megarl.algorithms.mismatch import metric_part, report_mismatch
from megarl.core.batch import MicroBatch
from megarl.core.sample import Group, Prompt, Sample, VersionSpan
from megarl.core.world import World
from megarl.data.pack import PackPlan, pack
from megarl.metrics.meter import Meter
from megarl.metrics.registry import check_meter
from tests.unit.one_rank import micro_of, one_rank_world, reported


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def numbers_of(micros: Sequence[MicroBatch], engines: Sequence[str], world: World) -> dict[str, float]:
    meter = Meter()
    for micro in micros:
        report_mismatch(micro, engines, meter)
    check_meter(meter)
    return reported(meter, world)


def gaps_of(*sequences: list[float]) -> MicroBatch:
    """Sequences of a prompt token and tokens with these gaps between trainer and engine."""
    gaps = torch.tensor([gap for one in sequences for gap in (7.0, *one)])  # that of the prompt must not matter
    masks = [[0.0] + [1.0] * len(one) for one in sequences]
    return micro_of(masks, old_logprobs=gaps - 1, rollout_logprobs=torch.full_like(gaps, -1.0))


def test_golden_gaps_and_tails(world: World) -> None:
    numbers = numbers_of([gaps_of([math.log(3), 0.0, -0.5, -math.log(4), math.log(20)])], (), world)
    sizes = [math.log(3), 0, 0.5, math.log(4), math.log(20)]
    assert numbers["mismatch/logprob_gap_mean"] == pytest.approx(sum(sizes) / 5, rel=1e-6)
    assert numbers["mismatch/logprob_gap_max"] == pytest.approx(math.log(20), rel=1e-6)
    assert numbers["mismatch/ratio_high_frac"] == 0.4
    assert numbers["mismatch/ratio_low_frac"] == 0.2
    assert numbers["mismatch/ratio_extreme_frac"] == 0.2
    assert numbers["mismatch/ratio_max"] == pytest.approx(20, rel=1e-6)
    assert numbers["mismatch/ratio_min"] == pytest.approx(0.25, rel=1e-6)
    assert numbers["mismatch/newest_logprob_gap_mean"] == numbers["mismatch/logprob_gap_mean"]


def test_quarters_are_those_of_each_response(world: World) -> None:
    micro = gaps_of([1.0, 0, 0, 0, 0, 0, 0, 0.5], [3.0], [], [0.25, 0, -0.75])
    numbers = numbers_of([micro], (), world)
    # first quarters: 1, 0 | 3 | 0.25; last: 0, 0.5 | 3 | 0.75
    assert numbers["mismatch/logprob_gap_first_quarter"] == pytest.approx(4.25 / 4)
    assert numbers["mismatch/logprob_gap_last_quarter"] == pytest.approx(4.25 / 4)
    growing = numbers_of([gaps_of([0.0, 0, 0, 0.5], [0.0, 0, 0, 1.5])], (), world)
    assert growing["mismatch/logprob_gap_first_quarter"] == 0
    assert growing["mismatch/logprob_gap_last_quarter"] == 1


def served(engine: str, gaps: list[float], version: int = 3, spans: Sequence[tuple[int, int, int]] = ()) -> Sample:
    return Sample(
        token_ids=np.arange(len(gaps) + 2),
        loss_mask=np.array([0, 0] + [1] * len(gaps), np.int8),
        rollout_logprobs=np.array([0, 0] + [-gap for gap in gaps], np.float32),
        finish="stop",
        version=version,
        spans=tuple(VersionSpan(*span) for span in spans),
        engine=engine,
    )


@pytest.mark.parametrize("dp_size", [1, 3])
def test_every_server_has_its_own_gap_over_the_newest_weights(world: World, dp_size: int) -> None:
    first, second = "http://127.0.0.1:30000", "http://[::1]:30001/"
    samples = [
        served(first, [0.5, 0.5]),
        served(first, [9.0] * 4, version=2),
        served(second, [9.0, 9.0, 1.0], version=2, spans=[(2, 0, 2), (3, 2, 3)]),
        served("", [2.0]),
    ]
    batches = pack([Group(Prompt("p", "", np.arange(2)), samples)], PackPlan(dp_size, 1, 9))
    assert {batch.engines for batch in batches} == {(first, second)}
    micros = [micro for batch in batches for micro in batch.microbatches()]
    for micro in micros:
        micro.old_logprobs = torch.zeros(micro.num_tokens)
    numbers = numbers_of(micros, batches[0].engines, world)
    own = {name: value for name, value in numbers.items() if name.startswith("mismatch/engine/")}
    assert own == {
        "mismatch/engine/127.0.0.1:30000/logprob_gap_mean": 0.5,
        "mismatch/engine/127.0.0.1:30000/root_gap_mean": pytest.approx(math.sqrt(0.5)),
        "mismatch/engine/127.0.0.1:30000/num_tokens": 2,
        "mismatch/engine/[::1]:30001/logprob_gap_mean": 1.0,
        "mismatch/engine/[::1]:30001/root_gap_mean": 1.0,
        "mismatch/engine/[::1]:30001/num_tokens": 1,
    }
    assert numbers["mismatch/newest_logprob_gap_mean"] == (0.5 + 0.5 + 1 + 2) / 4
    assert numbers["mismatch/logprob_gap_mean"] == (1 + 36 + 19 + 2) / 10


def test_engines_inside_the_ranks_are_not_told_apart(world: World) -> None:
    (batch,) = pack([Group(Prompt("p", "", np.arange(2)), [served("", [1.0])])], PackPlan(1, 1, 100))
    (micro,) = batch.microbatches()
    micro.old_logprobs = torch.zeros(micro.num_tokens)
    assert not [name for name in numbers_of([micro], batch.engines, world) if "engine" in name]


def test_nothing_sampled_is_nothing_reported() -> None:
    meter = Meter()
    report_mismatch(gaps_of([]), ("a",), meter)
    assert meter.statistics == {}


def test_a_server_is_named_by_host_and_port() -> None:
    assert metric_part("https://node7:1/engine/3/") == "node7:1_engine_3"
