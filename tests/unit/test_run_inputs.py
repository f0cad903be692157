"""What a run reads: sets to evaluate without prompts that are too long, and a description of all files."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

import pytest

from megarl.config.schema import RunConfig
from megarl.core.errors import DataError
from megarl.run.inputs import open_inputs
from tests.unit.config_files import MINIMAL, load_text

# 128 positions less 44 new tokens leave 84 for the prompt
LONG, SHORT = "1" * 85, "1" * 84


def write_rows(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "1"}) + "\n" for prompt in prompts))
    return path


def config_with(directory: Path, *overrides: str) -> RunConfig:
    rows = write_rows(directory / "rows.jsonl", SHORT, LONG, SHORT, SHORT)
    sets = f"eval.sets={{held_out: {{data: {rows}, max_prompts: 3}}}}"
    return load_text(directory, MINIMAL, sets, f"data.train=[{rows}, builtin:sort]", *overrides)


def test_sets_are_filtered_when_they_are_opened_and_the_count_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        inputs = open_inputs(config_with(tmp_path), with_prompts=True)
    prompts = inputs.eval_prompts["eval", "held_out"]
    assert [prompt.id for prompt in prompts] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert "eval.sets.held_out.data: 1 of 3 prompts are left out, too long: prompt 'rows.jsonl:2'" in caplog.text
    assert [len(source) for source in inputs.train_prompts] == [4, 65536], "training prompts wait for their turn"


def test_sets_with_a_prompt_that_is_too_long_are_refused_if_asked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"MRL-2401 prompt 'rows.jsonl:2' has 85 tokens; at most 84"):
        open_inputs(config_with(tmp_path, "data.too_long=error"), with_prompts=True)


def test_a_set_of_which_nothing_is_left_is_an_error(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "long.jsonl", LONG)
    with pytest.raises(DataError, match=r"MRL-2014 eval.sets.held_out.data: not one of 1 prompts is short enough"):
        open_inputs(config_with(tmp_path, f"eval.sets.held_out.data={rows}"), with_prompts=True)


def test_training_data_of_which_nothing_fits_is_an_error_before_the_start(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "long.jsonl", LONG, LONG)
    with pytest.raises(DataError, match=r"MRL-2014 .*long.jsonl: not one of 2 prompts is short enough"):
        open_inputs(config_with(tmp_path, f"data.train={rows}"), with_prompts=True)


@pytest.mark.parametrize("reward", ["exact_match", "math_answer"])
def test_rows_without_an_answer_are_bad_if_the_reward_compares_with_it(tmp_path: Path, reward: str) -> None:
    rows = tmp_path / "unanswered.jsonl"
    rows.write_text('{"prompt": "1"}\n')
    with pytest.raises(DataError, match=r"unanswered.jsonl:1.*answer"):
        open_inputs(config_with(tmp_path, f"data.train={rows}", f"reward={reward}"), with_prompts=True)


def test_the_run_directory_tells_what_was_read(tmp_path: Path) -> None:
    inputs = open_inputs(config_with(tmp_path), with_prompts=True, describe_in=tmp_path)
    rows = tmp_path / "rows.jsonl"
    sha256 = hashlib.sha256(rows.read_bytes()).hexdigest()
    read = {"path": str(rows), "sha256": sha256, "num_rows": 4, "num_bad_rows": 0}
    built_in = {"path": "builtin:sort", "sha256": None, "num_rows": 65536, "num_bad_rows": 0}
    assert json.loads((tmp_path / "data.json").read_text()) == {
        "data.train.0": read,
        "data.train.1": built_in,
        "eval.sets.held_out.data": read,
    }
    assert inputs.train_hashes == {str(rows): sha256}


def test_sets_that_are_scored_alike_share_their_workers(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "few.jsonl", SHORT)
    rewards = {"a": "math_answer", "b": "[math_answer]", "c": "{name: math_answer, weight: 2}", "d": "exact_match"}
    sets = ", ".join(f"{name}: {{data: {rows}, reward: {reward}}}" for name, reward in rewards.items())
    inputs = open_inputs(config_with(tmp_path, f"eval.sets={{{sets}}}"), with_prompts=True)
    a, b, c, d = (inputs.eval_scorers["eval", name] for name in "abcd")
    assert a is b
    assert d is inputs.scorer
    assert len({id(one) for one in (a, c, d)}) == 3
