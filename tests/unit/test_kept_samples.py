"""What is kept of some steps for people to look at: samples with what became of every token, and timelines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.core.batch import TrainBatch
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.data.pack import PackPlan, pack
from megarl.data.record import read_groups
from megarl.run.kept_samples import KeptSamples
from megarl.run.timeline import Timeline, Timelines, is_kept
from tests.unit.one_rank import one_rank_world
from tests.unit.test_algorithms_credit import group_of


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def step_of() -> tuple[list[Group], TrainBatch]:
    """Three groups, in microbatches whose advantages are the samples' numbers."""
    groups = [group_of([1.0, 0.0], [3, 1], "a"), group_of([0.5, 0.5], [2, 2], "b"), group_of([0.0], [4], "c")]
    (batch,) = pack(groups, PackPlan(1, 1, 6))
    for micro in batch.microbatches():
        micro.advantages = micro.sample_index[micro.sequence_of_token].float() * micro.loss_mask
        micro.old_logprobs = -torch.ones_like(micro.loss_mask) * micro.loss_mask
    return groups, batch


def test_the_first_steps_every_tenth_and_the_last_are_kept() -> None:
    assert [step for step in range(1, 36) if is_kept(step, 35)] == [1, 2, 10, 20, 30, 35]


def test_samples_are_kept_with_what_became_of_their_tokens(world: World, tmp_path: Path) -> None:
    groups, batch = step_of()
    kept = KeptSamples(tmp_path / "samples", 2, 100, world)
    kept.keep(10, groups, batch)
    kept.keep(11, groups, batch)
    (path,) = (tmp_path / "samples").iterdir()
    assert path.name == "step_000010.jsonl"
    samples = [sample for line in path.read_text().splitlines() for sample in json.loads(line)["samples"]]
    assert [sample["token_advantages"] for sample in samples] == [[0] * 4, [0, 1], [0, 2, 2], [0, 3, 3]]
    assert [sample["old_logprobs"] for sample in samples][1] == [0, -1]
    (again,) = read_groups(path).values()
    assert [sample.reward for group in again for sample in group.samples] == [1.0, 0.0, 0.5, 0.5]


def test_a_step_that_is_made_again_replaces_its_samples(world: World, tmp_path: Path) -> None:
    groups, batch = step_of()
    kept = KeptSamples(tmp_path, 3, 100, world)
    for _ in range(2):
        kept.keep(10, groups, batch)
    assert len((tmp_path / "step_000010.jsonl").read_text().splitlines()) == 3


def test_nothing_is_kept_unless_asked(world: World, tmp_path: Path) -> None:
    KeptSamples(tmp_path / "samples", 0, 100, world).keep(10, *step_of())
    assert not (tmp_path / "samples").exists()


def test_what_cannot_be_written_costs_one_warning(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "samples").write_text("in the way")
    (tmp_path / "timeline.jsonl").mkdir()
    kept = KeptSamples(tmp_path / "samples", 2, 100, world)
    timelines = Timelines(Timeline(), tmp_path / "timeline.jsonl", 100, world)
    for step in (10, 20):
        kept.keep(step, *step_of())
        timelines.keep(step)
    assert len(caplog.records) == 2


def test_a_timeline_has_the_segments_of_its_step(world: World, tmp_path: Path) -> None:
    timeline = Timeline()
    timelines = Timelines(timeline, tmp_path / "timeline.jsonl", 100, world)
    for step in (9, 10):
        timeline.add("a/work", "execute", 0.0, float(step))
        timelines.keep(step)
    (line,) = (tmp_path / "timeline.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == 10
    ((rank, phase, part, _, seconds),) = record["segments"]
    assert (rank, phase, part, seconds) == (0, "a/work", "execute", 10.0)
