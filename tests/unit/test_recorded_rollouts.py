"""A recording in the place of engines: the same groups and statistics, and plain words for what is missing or wrong."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megarl.core.errors import DataError, MissingInputError, StorageError
from megarl.core.sample import Group, Prompt, Sample
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.rollout.recorded import RecordedRollouts, Recording, ReplayLimits, recorded_steps
from megarl.rollout.statistics import report_rollouts
from tests.unit.one_rank import one_rank_world, reported

LIMITS = ReplayLimits(vocab_size=50, max_tokens=20, max_new_tokens=8, max_prompt_tokens=4)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as alone:
        yield alone


def groups_of(step: int, num_groups: int = 3) -> list[Group]:
    draw = np.random.default_rng(step)

    def sample(prompt: Prompt) -> Sample:
        num_response = int(draw.integers(1, 9))
        return Sample(
            token_ids=np.concatenate([prompt.token_ids, draw.integers(0, 50, num_response)]),
            loss_mask=np.repeat(np.array([0, 1], np.int8), [len(prompt.token_ids), num_response]),
            rollout_logprobs=-draw.random(len(prompt.token_ids) + num_response, dtype=np.float32),
            finish="stop",
            version=step - 1 - int(draw.integers(0, 2)),
            engine="http://127.0.0.1:1",
            reward=float(draw.random()),
            scores={"right": float(draw.random())},
        )

    prompts = [Prompt(f"{step}/{row}", "", draw.integers(0, 50, int(draw.integers(1, 5)))) for row in range(num_groups)]
    return [Group(prompt, [sample(prompt) for _ in range(4)]) for prompt in prompts]


def recording_of(directory: Path, steps: Sequence[int], world: World) -> Recording:
    recording = Recording(directory, world)
    for step in steps:
        recording.write(step, groups_of(step), epoch=step // 2)
    return recording


def test_a_replayed_step_has_the_numbers_of_the_recorded_one(tmp_path: Path, world: World) -> None:
    recording_of(tmp_path / "new" / "rollouts", (4, 5), world)
    rollouts = RecordedRollouts(tmp_path / "new" / "rollouts", LIMITS, world)
    assert rollouts.epoch == 0
    for step in (4, 5):
        told, retold = Meter(), Meter()
        report_rollouts(groups_of(step), LIMITS.max_new_tokens, LIMITS.max_prompt_tokens, step, told)
        found = rollouts.collect(step, retold)
        assert reported(retold, world) == reported(told, world)
        assert rollouts.epoch == 2
        for group, again in zip(groups_of(step), found, strict=True):
            for sample, read in zip(group.samples, again.samples, strict=True):
                assert read.rollout_logprobs.tobytes() == sample.rollout_logprobs.tobytes()
                assert (read.engine, read.reward, read.version) == (sample.engine, sample.reward, sample.version)


def test_only_the_driver_reads_and_writes(tmp_path: Path, world: World) -> None:
    other = replace(world, rank=1)
    Recording(tmp_path / "none", other).write(1, [], epoch=0)
    assert RecordedRollouts(tmp_path / "none", LIMITS, other).collect(1, Meter()) == []
    assert not (tmp_path / "none").exists()


def test_a_step_made_again_replaces_the_earlier_one(tmp_path: Path, world: World) -> None:
    recording = recording_of(tmp_path, (1, 2), world)
    recording.write(2, groups_of(9, num_groups=1), epoch=7)
    rollouts = RecordedRollouts(tmp_path, LIMITS, world)
    assert [group.prompt.id for group in rollouts.collect(2, Meter())] == ["9/0"]
    assert rollouts.epoch == 7
    assert recorded_steps(tmp_path) == [1, 2]


def test_what_is_not_there_is_named(tmp_path: Path, world: World) -> None:
    with pytest.raises(MissingInputError, match=r"MRL-4103 .*none: there is no such recording"):
        RecordedRollouts(tmp_path / "none", LIMITS, world)
    empty = RecordedRollouts(tmp_path, LIMITS, world)
    with pytest.raises(MissingInputError, match="it has no steps at all"):
        empty.collect(1, Meter())
    recording_of(tmp_path, (1, 2, 3, 7), world)
    with pytest.raises(MissingInputError, match=r"no recording of step 4; it has steps 1-3, 7\."):
        empty.collect(4, Meter())


def test_a_damaged_file_is_located(tmp_path: Path, world: World) -> None:
    recording_of(tmp_path, (1, 2), world)
    path = tmp_path / "step_000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:40])
    rollouts = RecordedRollouts(tmp_path, LIMITS, world)
    with pytest.raises(DataError, match=r"MRL-2302 .*step_000001.jsonl:2 "):
        rollouts.collect(1, Meter())
    path.write_bytes((tmp_path / "step_000002.jsonl").read_bytes())
    with pytest.raises(DataError, match=r"MRL-2302 .*step_000001.jsonl:1 is not a recording of step 1 alone"):
        rollouts.collect(1, Meter())
    path.write_bytes(b"")
    with pytest.raises(DataError, match="MRL-2302"):
        rollouts.collect(1, Meter())


def test_samples_of_another_model_are_refused(tmp_path: Path, world: World) -> None:
    recording_of(tmp_path, (1,), world)
    with pytest.raises(DataError, match=r"MRL-2303 .*prompt '1/\d' has the token id \d+; .* vocabulary has 30 tokens"):
        RecordedRollouts(tmp_path, replace(LIMITS, vocab_size=30), world).collect(1, Meter())
    with pytest.raises(DataError, match=r"MRL-2303 .* tokens; the model has 3 positions"):
        RecordedRollouts(tmp_path, replace(LIMITS, max_tokens=3), world).collect(1, Meter())


def test_a_full_disk_leaves_no_half_step(tmp_path: Path, world: World) -> None:
    recording = recording_of(tmp_path, (1,), world)
    before = (tmp_path / "step_000001.jsonl").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        for step in (1, 2):
            with pytest.raises(StorageError, match=r"MRL-7304 .*step_00000\d.jsonl cannot be recorded") as refused:
                recording.write(step, groups_of(2), epoch=0)
            assert refused.value.exit_code == 74
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert recorded_steps(tmp_path) == [1]
    assert (tmp_path / "step_000001.jsonl").read_bytes() == before
    recording.write(2, groups_of(2), epoch=0)
    assert recorded_steps(tmp_path) == [1, 2]
