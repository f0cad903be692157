"""The console can be read by people, by the grep recipes of the veRL log guide, and next to a progress bar."""

import io
import math
import os
import pty
import re
import subprocess
import sys
import termios

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.trackers.progress_bar import ProgressBar
from megarl.trackers.to_stdout import ToStdout, format_number, format_step
from megarl.trackers.views import Spelling

SCORES = [i / 256 for i in range(1, 13)]
SECONDS = [41.01343672798248 + i for i in range(12)]


@pytest.fixture
def log(tmp_path):
    """Twelve steps, an evaluation and the progress bar in one file, as `> train.log 2>&1` has it."""
    with open(tmp_path / "train.log", "w") as stream:
        console, bar = ToStdout(stream), ProgressBar(stream)
        bar.start(total=12, initial=0)
        for step, (score, seconds) in enumerate(zip(SCORES, SECONDS, strict=True), start=1):
            metrics = {
                "timing_s/step_wall": seconds + 1,
                "timing_s/step": seconds,
                "actor/pg_loss": -0.0123,
                "actor/lr": 1e-6,
                "critic/score/mean": score,
                "critic/score/max": 1.0,
                "critic/rewards/mean": score,
                "training/epoch": 0.0,
                "training/global_step": float(step),
                "perf/time_per_step": 10.0,  # must not pass for step 10
            }
            if step % 10 == 0:
                metrics["eval/openai/gsm8k/score/mean@1"] = 0.5
            console.log(metrics, step)
            bar.advance({"score": score})
        bar.close()
    return tmp_path


def sh(command: str, cwd) -> list[str]:
    # The C locale is the harshest: there, grep takes a file with other than ASCII bytes for binary.
    run = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=True
    )
    assert run.stderr == ""
    return run.stdout.splitlines()


def test_latest_steps(log):
    assert [line.split(" ")[0] for line in sh('tail -100 train.log | grep "^step:"', log)] == [
        f"step:{step}" for step in range(1, 13)
    ]


def test_progress(log):
    lines = sh('grep "Training Progress" train.log | tail -5', log)
    assert [re.search(r" (\d+)/12 \[", line)[1] for line in lines] == ["8", "9", "10", "11", "12"]
    assert all(re.match(r"Training Progress: +\d+%\|.*\| .*score=0\.0\d+\]$", line) for line in lines)
    assert lines[-1].startswith("Training Progress: 100%|")


def test_one_step_in_detail(log):
    (line,) = sh('grep "step:10 " train.log', log)
    assert line.startswith(
        "step:10 - training/global_step:10 - training/epoch:0 - critic/score/max:1.0 - critic/score/"
    )


def test_evaluations(log):
    (line,) = sh('grep "val/test_score" train.log', log)
    assert line.startswith("step:10 ")
    assert " - val/test_score/openai/gsm8k:0.5" in line


def test_score_curve(log):
    lines = sh('grep "^step:" train.log | grep -o "critic/score/mean:[0-9.]*" | cut -d: -f2', log)
    assert [float(line) for line in lines] == SCORES
    assert lines[5] == "0.0234375"  # 6 of 256


def test_seconds_per_step(log):
    lines = sh('grep "^step:" train.log | grep -o "timing_s/step:[0-9.]*" | cut -d: -f2', log)
    assert [float(line) for line in lines] == SECONDS


def test_three_metrics_of_the_last_ten_steps(log):
    command = r"""grep "^step:" train.log | tail -10 | \
  grep -o "training/global_step:[0-9]* \|critic/score/mean:[0-9.]* \|timing_s/step:[0-9.]*" """
    lines = sh(command, log)
    assert len(lines) == 30
    assert lines[:3] == ["training/global_step:3 ", "critic/score/mean:0.01171875 ", f"timing_s/step:{SECONDS[2]!r}"]


def test_small_and_negative_numbers_can_be_extracted(log):
    assert set(sh('grep "^step:" train.log | grep -o "actor/lr:[0-9.]*" | cut -d: -f2', log)) == {"0.000001"}
    assert set(sh('grep -oE "actor/pg_loss:-?[0-9.]*" train.log | cut -d: -f2', log)) == {"-0.0123"}


def test_the_line_of_the_guide():
    metrics = {
        "timing_s/step": 41.01343672798248,
        "critic/rewards/mean": 6 / 256,
        "critic/score/mean": 6 / 256,
        "training/global_step": 5.0,
    }
    assert format_step(metrics, 5) == (
        "step:5 - training/global_step:5 - critic/score/mean:0.0234375 - "
        "critic/rewards/mean:0.0234375 - timing_s/step:41.01343672798248"
    )


def test_memory_and_phase_times_stay_off_the_console():
    metrics = {
        "memory/cpu/actor_train/train_step/end/rss": 1.0,
        "time/actor_train/train_step/total": 2.0,
        "timing_s/gen": 3.0,
        "half_right": 0.25,
    }
    assert format_step(metrics, 1) == "step:1 - timing_s/gen:3.0 - user/half_right:0.25"


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (1e-6, "0.000001"),
        (-1.5e-7, "-0.00000015"),
        (1e-12, "0.000000000001"),
        (9.9e-13, "9.9e-13"),
        (0.0, "0.0"),
        (10.0, "10.0"),
        (7, "7"),
        (999999999999999.9, "999999999999999.9"),
        (1e15, "1e+15"),
        (-1.234567890123456e15, "-1.234567890123456e+15"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
    ],
)
def test_numbers(x, text):
    assert format_number(x) == text


@given(st.floats(allow_nan=False))
def test_numbers_read_back_exactly(x):
    text = format_number(x)
    assert float(text) == x
    assert ("e" in text) == (math.isfinite(x) and x != 0 and not 1e-12 <= abs(x) < 1e15)


def test_numpy_types_never_reach_the_line():
    metrics = {"critic/score/mean": np.float64(0.5), "mine": np.float64(0.25), "count": np.int64(3), "n": 3}
    assert format_step(metrics, 1) == "step:1 - critic/score/mean:0.5 - user/count:3.0 - user/mine:0.25 - user/n:3"


def test_views_change_names_only():
    metrics = {"actor/pg_clipfrac": 0.1, "timing_s/gen": 2.0, "weights/version": 3.0, "mine": 1.0}
    assert Spelling(["native"]).spell(metrics) == {
        "actor/pg_clipfrac": 0.1, "timing_s/gen": 2.0, "weights/version": 3, "user/mine": 1.0,
    }  # fmt: skip
    assert list(Spelling(["roll"]).spell(metrics)) == ["actor/clipfrac", "time/rollout", "weights/version", "user/mine"]
    assert list(Spelling(["trinity"]).spell(metrics)) == [
        "actor/pg_clipfrac",
        "time/gen",
        "weights/version",
        "user/mine",
    ]
    assert list(Spelling(["all"]).spell(metrics)) == [
        "actor/pg_clipfrac", "actor/clipfrac", "timing_s/gen", "time/rollout", "time/gen",
        "weights/version", "user/mine",
    ]  # fmt: skip
    assert isinstance(Spelling(["native"]).spell(metrics)["weights/version"], int)


def test_the_bar_of_a_resumed_run_starts_where_it_left():
    stream = io.StringIO()
    bar = ProgressBar(stream)
    bar.start(total=60, initial=29)
    bar.advance()
    bar.close()
    assert re.fullmatch(r"Training Progress:  50%\|#+ +\| 30/60 \[.*\]\n", stream.getvalue())


IN_A_TERMINAL = """
from megarl.trackers.progress_bar import ProgressBar
from megarl.trackers.to_stdout import ToStdout
console, bar = ToStdout(), ProgressBar()
bar.start(total=3, initial=0)
for step in range(1, 4):
    console.log({"critic/score/mean": step / 4}, step)
    bar.advance({"score": step / 4})
bar.close()
"""


def run_in_a_terminal(num_columns: int) -> str:
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, num_columns))
    process = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL], stdout=follower, stderr=follower)
    os.close(follower)
    output = b""
    # Linux ends the reader of a terminal that nobody holds open any more with an error, not with an empty read.
    while chunk := _read(leader):
        output += chunk
    os.close(leader)
    assert process.wait() == 0
    return output.decode()


def test_lines_and_bar_do_not_garble_each_other_in_a_terminal():
    output = run_in_a_terminal(num_columns=100)
    lines = _screen(output)
    assert lines[:3] == [f"step:{step} - critic/score/mean:{step / 4}" for step in (1, 2, 3)]
    assert lines[3].startswith("Training Progress: 100%|")
    assert "3/3" in lines[3]
    assert "score=0.75" in lines[3]
    assert output.count("Training Progress") >= 4  # the live bar: at the start and after each step


def test_a_terminal_without_columns_gets_lines():
    lines = run_in_a_terminal(num_columns=0).splitlines()
    assert [line.split(":")[0] for line in lines] == ["step", "Training Progress"] * 3


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        return b""


def _screen(text: str) -> list[str]:
    """What a terminal shows: a carriage return goes back to column 0, later characters overwrite earlier ones."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        column = 0
        for character in line:
            if character == "\r":
                column = 0
                continue
            cells[column : column + 1] = [character]
            column += 1
        lines.append("".join(cells).rstrip())
    return lines
