"""``megarl samples``: the right samples, all of them as JSON, and texts that cannot harm a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli import main
from megarl.core.sample import Group
from megarl.data.record import write_groups
from megarl.report.sample_files import choose, read_step
from megarl.report.sample_table import render
from megarl.report.terminal_text import num_cells, visible, wrap
from tests.unit.groups import group_with, sample_with

HOSTILE = "red \x1b[31m\x1b]0;title\x07 back\rwards \u202etxt.exe\u2066 \ud800 \x9b2J nul\0 tab\tend"


def credited(group: Group) -> Group:
    for sample in group.samples:
        sample.shaped_reward, sample.advantage = sample.reward, (sample.reward or 0) - 0.5
    return group


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Step 10 is kept, steps 10 and 11 are recorded, and step 12 lost everything to filters. Seen 100 columns wide."""
    monkeypatch.setenv("COLUMNS", "100")
    first = [sample_with(reward, response=f"answer {reward:g}") for reward in (0.25, 1.0, 0.0, 0.5)]
    groups = [
        group_with(first, "a", "two plus two?"),
        group_with([sample_with(0.75, response="Quite SURE")], "b", HOSTILE),
    ]
    for kind in ("samples", "rollouts"):
        (tmp_path / kind).mkdir()
    write_groups(tmp_path / "rollouts/step_000010.jsonl", 10, groups)
    write_groups(tmp_path / "rollouts/step_000011.jsonl", 11, groups[:1])
    write_groups(tmp_path / "samples/step_000010.jsonl", 10, [credited(groups[0])])
    write_groups(tmp_path / "rollouts/step_000012.jsonl", 12, [])
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["samples", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_worst_best_and_random_ones_are_shown_with_their_numbers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, "--step", 10)
    assert text.startswith("step 10: 2 prompts, 5 samples in samples/step_000010.jsonl and rollouts/step_000010.jsonl")
    assert "reward: mean 0.5, lowest 0, highest 1" in text
    assert [text.count(f"── {why} ·") for why in ("worst", "best", "random")] == [2, 2, 1]  # none twice
    worst = text.partition("── worst")[2].partition("──")[2]
    assert "reward 0  advantage -0.5  3 tokens  finish stop  version 0" in worst
    assert "two plus two?" in worst
    assert "answer 0" in worst
    # this one was recorded before it was credited
    assert "reward 0.75  advantage -  3 tokens" in text


def test_the_newest_step_is_shown_unless_another_is_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run)
    assert text == (
        "step 12: 0 prompts, 0 samples in rollouts/step_000012.jsonl\n"
        "Filters and failed rewards left nothing of this step.\n"
    )


def test_only_what_was_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, run, "--step", 10, "--show", "best", "--num", 1)
    assert text.count("──") and "answer 1" in text and "answer 0" not in text
    text = printed(capsys, run, "--step", 10, "--contains", "quite sure")
    assert "SURE" in text and "two plus two" not in text
    assert main(["samples", str(run), "--step", "10", "--contains", "nowhere"]) == 0
    assert "no sample of this step contains" in capsys.readouterr().err


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_lines_are_what_was_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = lines_of(printed(capsys, run, "--step", 10, "--jsonl"))
    written = [json.loads(line) for line in (run / "rollouts/step_000010.jsonl").read_text().splitlines()]
    kept = json.loads((run / "samples/step_000010.jsonl").read_text())
    expected = [
        {"step": 10, "group": number, "sample": position, "prompt": group["prompt"], **sample}
        for number, group in enumerate([kept, written[1]])
        for position, sample in enumerate(group["samples"])
    ]
    assert rows == expected
    few = lines_of(printed(capsys, run, "--step", 10, "--jsonl", "--show", "worst", "--num", 1))
    assert [row["reward"] for row in few] == [0.0]


@pytest.mark.parametrize("width", [1, 40, 80, 200])
@pytest.mark.parametrize("full", [False, True])
def test_no_text_can_disturb_a_terminal(tmp_path: Path, width: int, full: bool) -> None:
    (tmp_path / "samples").mkdir()
    texts = [
        HOSTILE,
        "x" * 100_000,
        "字" * 5_000,
        "e" + "\u0301" * 50_000,
        "👩‍🚀 " * 500,
        "\n" * 5_000,
        "│ reward 1\n── best",
    ]
    samples = [sample_with(float(i), response=text) for i, text in enumerate(texts)]
    write_groups(tmp_path / "samples/step_000001.jsonl", 1, [group_with(samples, HOSTILE, HOSTILE)])
    sampled = read_step(tmp_path, None)
    lines = list(render(sampled, choose(sampled.rows, ["worst"], 99), width, full=full))
    room = max(50, min(width, 160))
    for line in lines:
        assert line.isprintable(), ascii(line)
        assert num_cells(line) <= room
    assert full or len(lines) < 40 * len(texts)
    assert sum(line.startswith("── ") for line in lines) == len(texts)  # no text can look like a block of ours
    assert full or sum("characters: see --full" in line for line in lines) == 5


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=300), width=st.integers(2, 60))
def test_wrapping_loses_only_spaces(text: str, width: int) -> None:
    lines = list(wrap(text, width))
    assert all(num_cells(line) <= width and line.isprintable() for line in lines)
    assert "".join(lines).replace(" ", "") == visible(text).replace(" ", "").replace("\n", "")


def test_conversations_say_who_speaks_and_failures_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rollouts").mkdir()
    turns = [["policy", "calc: 2+2", 5], {"speaker": "environment", "text": "4", "num_tokens": 1}]
    samples = [
        {"reward": 1.0, "scores": {"exact": 1.0}, "response": "calc: 2+24", "turns": turns, "loss_mask": [0, 1]},
        {"reward": None, "failure": "timed out\x1b[0m after 5 s", "response": "?", "finish": "length"},
    ]
    group = {"step": 3, "num_groups": 1, "group": 0, "prompt": {"id": "1", "text": "2+2?"}, "samples": samples}
    (tmp_path / "rollouts/step_000003.jsonl").write_text(json.dumps(group) + '\n{"step": 3, "gro')
    assert main(["samples", str(tmp_path)]) == 0
    text, problems = capsys.readouterr()
    assert "     policy │ calc: 2+2\n" in text
    assert "environment │ 4\n" in text
    assert "     scores │ exact 1\n" in text
    assert "     failed │ timed out⟨U+001B⟩[0m after 5 s\n" in text
    assert "1 sample failed to be scored" in text
    assert text.index("timed out") < text.index("calc: 2+2")  # a failed one is worse than any
    assert problems == "1 lines could not be read and were left out\n"


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["nowhere"], "MRL-4210", "no directory"),
        (["empty"], "MRL-4211", "rollout.kept_groups"),
        (["run", "--step", "9"], "MRL-4212", "it has steps 10-12"),
    ],
)
def test_what_is_missing_is_said_with_what_is_there(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: str, told: str
) -> None:
    (run / "empty").mkdir()
    where = {"run": run, "empty": run / "empty"}
    assert main(["samples", *[str(where.get(one, one)) for one in arguments]]) == 66
    message = capsys.readouterr().err
    assert message.startswith(code)
    assert told in message


def test_no_samples_are_not_a_number_to_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run), "--num", "0"]) == 64
    assert "'0' is not a whole number above 0" in capsys.readouterr().err


def test_a_reader_that_leaves_early_and_a_terminal_without_unicode(run: Path) -> None:
    command = [sys.executable, "-m", "megarl", "samples", str(run), "--step", "10"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    plain = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert plain.stdout.isascii()
    assert b"\\u2502" in plain.stdout
    many = [group_with([sample_with(1.0, response="word " * 2000)] * 50)] * 20
    write_groups(run / "samples/step_000020.jsonl", 20, many)
    with subprocess.Popen([*command[:-2], "--jsonl"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        reader.stdout.readline()
        reader.stdout.close()
        assert reader.stderr.read() == b""
        assert reader.wait() == 141
