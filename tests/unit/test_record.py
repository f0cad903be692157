"""Recorded rollouts: what is read is what was written, to the last bit."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import DataError, MissingInputError
from megarl.core.sample import Group, Prompt, Sample, VersionSpan
from megarl.data.record import RecordedStep, read_groups, read_steps, write_groups

text = st.text(st.characters(), max_size=20)  # any code point, lone surrogates and line separators included
floats = st.floats(allow_nan=False, allow_infinity=False)
logprobs = st.floats(allow_nan=False, allow_infinity=False, width=32)
ids = st.lists(st.integers(0, 2**40), max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | text, lambda inner: st.lists(inner, max_size=3), max_leaves=4
)

spans = st.lists(st.builds(VersionSpan, *[st.integers(0, 2**40)] * 3), max_size=3).map(tuple)


@st.composite
def experts(draw: st.DrawFn) -> np.ndarray | None:
    shape = draw(st.tuples(*[st.integers(0, 3)] * 3))
    size = int(np.prod(shape))
    numbers = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=size, max_size=size))
    return np.array(numbers, np.int32).reshape(shape)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    token_ids = draw(ids)
    size = len(token_ids)
    mask = [0, *draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))][:size]  # nobody predicts a first token
    return Sample(
        token_ids=np.array(token_ids, np.int64),
        loss_mask=np.array(mask, np.int8),
        rollout_logprobs=np.array(draw(st.lists(logprobs, min_size=size, max_size=size)), np.float32),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        response=draw(text),
        version=draw(st.integers(0, 2**40)),
        spans=draw(spans),
        engine=draw(text),
        routed_experts=draw(st.none() | experts()),
        seed=draw(st.integers(0, 2**63)),
        reward=draw(st.none() | floats),
        scores=draw(st.dictionaries(text, floats, max_size=2)),
        advantage=draw(floats),
    )


prompts = st.builds(
    Prompt,
    id=text,
    text=text,
    token_ids=ids.map(lambda values: np.array(values, np.int64)),
    answer=st.none() | text,
    demonstration=st.none() | text,
    task=text,
    metadata=st.dictionaries(text, json_values, max_size=2),
)
group_lists = st.lists(st.builds(Group, prompts, st.lists(samples(), max_size=3)), min_size=1, max_size=3)


def bits(record: Any) -> Any:
    """Everything in a form that compares exactly: arrays as bytes, floats as hexadecimal."""
    if isinstance(record, np.ndarray):
        return record.dtype.name, record.shape, record.tobytes()
    if isinstance(record, float):
        return record.hex()
    if isinstance(record, list):
        return [bits(item) for item in record]
    if isinstance(record, dict):
        return {key: bits(value) for key, value in record.items()}
    if isinstance(record, (Group, Prompt, Sample, RecordedStep)):
        return {field.name: bits(getattr(record, field.name)) for field in fields(record)}
    return record


@given(st.dictionaries(st.integers(0, 10**9), st.builds(RecordedStep, st.integers(0, 99), group_lists), max_size=3))
@settings(max_examples=50, deadline=None)  # a deadline would measure the disk
def test_groups_come_back_exactly(steps: dict[int, RecordedStep]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "groups.jsonl"
        path.touch()
        for step, recorded in steps.items():
            write_groups(path, step, recorded.groups, epoch=recorded.epoch)
        assert bits(read_steps(path)) == bits(steps)
        assert bits(read_groups(path)) == bits({step: recorded.groups for step, recorded in steps.items()})


def test_a_recording_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    write_groups(path, 1, [make_group("a"), make_group("b")])
    lines = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        del record["epoch"], record["num_groups"]
        for sample in record["samples"]:
            del sample["spans"], sample["engine"], sample["routed_experts"]
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))
    assert bits(read_steps(path)) == bits({1: RecordedStep(0, [make_group("a"), make_group("b")])})


def test_a_recording_that_lost_its_last_lines_is_not_a_smaller_one(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    write_groups(path, 1, [make_group("a"), make_group("b"), make_group("c")])
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(DataError, match=r"MRL-2302 .*groups.jsonl:2 .*2 of 3 groups"):
        read_groups(path)


def make_group(prompt_id: str, logprob: float = -0.5) -> Group:
    sample = Sample(np.ones(2, np.int64), np.arange(2, dtype=np.int8), np.full(2, logprob, np.float32), "stop")
    return Group(Prompt(prompt_id, "", np.zeros(1, np.int64)), [sample])


def test_a_repeated_step_replaces_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    write_groups(path, 1, [make_group("a"), make_group("b")])
    write_groups(path, 2, [make_group("c")])
    write_groups(path, 1, [make_group("d")])
    steps = read_groups(path)
    assert {step: [group.prompt.id for group in groups] for step, groups in steps.items()} == {1: ["d"], 2: ["c"]}


def test_numbers_that_json_cannot_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    with pytest.raises(DataError, match=r"MRL-2301 .*'b' at step 4"):
        write_groups(path, 4, [make_group("a"), make_group("b", float("nan"))])
    assert not path.exists()


@pytest.mark.parametrize("damage", ["cut", "garbage", "other object", "huge id", "missing group"])
def test_a_damaged_recording_is_located(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "groups.jsonl"
    write_groups(path, 1, [make_group("a"), make_group("b"), make_group("c")])
    lines = path.read_bytes().splitlines(keepends=True)
    if damage == "missing group":
        del lines[1]
    else:
        lines[1] = {"cut": lines[1][:50], "garbage": b"\xff\xfe\n", "other object": b'{"step": 1}\n',
                    "huge id": lines[1].replace(b'"token_ids":[1', b'"token_ids":[1' + b"0" * 30)}[damage]  # fmt: skip
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"MRL-2302 .*groups.jsonl:2 "):
        read_groups(path)


def test_a_missing_recording(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="no such recording"):
        read_groups(tmp_path / "none.jsonl")
