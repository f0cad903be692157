"""Numbers about a step's groups."""

from __future__ import annotations

import numpy as np

from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.meter import Meter
from megarl.metrics.registry import check_meter
from megarl.rollout.statistics import report_rollouts
from tests.unit.one_rank import one_rank_world, reported


def make_sample(num_prompt: int, num_response: int, version: int, **fields: object) -> Sample:
    length = num_prompt + num_response
    return Sample(
        token_ids=np.arange(length),
        loss_mask=np.repeat(np.array([0, 1], np.int8), [num_prompt, num_response]),
        rollout_logprobs=np.zeros(length, np.float32),
        version=version,
        **{"finish": "stop", **fields},
    )


def test_versions_lengths_and_scores_are_counted_over_samples() -> None:
    first, second = (Prompt(name, "", np.arange(size)) for name, size in (("a", 2), ("b", 4)))
    groups = [
        Group(first, [make_sample(2, 3, 6, scores={"right": 1.0}), make_sample(2, 8, 4, finish="length")]),
        Group(second, [make_sample(4, 1, 5, scores={"right": 0.0}), make_sample(4, 0, 6, finish="abort")]),
    ]
    meter = Meter()
    report_rollouts(groups, max_new_tokens=8, max_prompt_tokens=4, step=7, meter=meter)
    check_meter(meter)
    with one_rank_world() as world:
        numbers = reported(meter, world)
    expected = {
        "sample/model_version/mean": 5.25,
        "sample/staleness/mean": 0.75,
        "sample/staleness/max": 2,
        "sample/staleness/min": 0,
        "rollout/model_version": 6,
        "response_length/mean": 3,
        "response_length/clip_ratio": 0.25,
        "response/aborted_ratio": 0.25,
        "prompt_length/clip_ratio": 0.5,
        "rollout/right/mean": 0.5,
        "rollout/finished_task_count": 2,
    }
    assert {name: numbers[name] for name in expected} == expected


def test_ranks_without_groups_report_nothing() -> None:
    meter = Meter()
    report_rollouts([], max_new_tokens=8, max_prompt_tokens=4, step=7, meter=meter)
    assert meter.statistics == {}
