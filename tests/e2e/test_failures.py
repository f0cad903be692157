"""What goes wrong: one clear message, the right exit code, and nothing left running."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml

from tests.e2e.runs import QUICKSTART, SHORT, command, environment, ranks_of, running, train

REWARDS = """
def raises(prompt, sample):
    return 1 / 0

def not_a_number(prompt, sample):
    return float("nan")

def one_argument(prompt):
    return 1.0
"""


def assert_one_message(stderr: str, code: str) -> str:
    """The message: no traceback, exactly one error."""
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if not line.startswith("Training Progress")]
    assert sum(line.startswith("MRL-") for line in lines) == 1, stderr
    message = "\n".join(lines)
    assert code in message, stderr
    return message


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return tmp_path


# -- found before any rank is started


@pytest.mark.parametrize(
    ("override", "exit_code", "code", "hint"),
    [
        ("model.path=no_such_model model.config=null", 66, "MRL-4", "no_such_model"),
        ("data.train=no_such_file.jsonl", 66, "MRL-4", "no_such_file.jsonl"),
        ("data.train=builtin:carrie", 64, "MRL-1", "builtin:carry"),
        ("reward=my_rewards:missing", 64, "MRL-1303", "raises"),
        ("reward=my_rewards:one_argument", 64, "MRL-1408", "reward(prompt, sample"),
        ("reward=no_such_module:f", 64, "MRL-1302", "no_such_module"),
        ("run.num_ranks=3 actor.parallel.tp_size=2", 64, "MRL-1101", "2 or 4"),
        ("run.num_ranks=3 actor.parallel.tp_size=3", 64, "MRL-1102", "Valid here: 1"),
        ("run.dir=/proc/nowhere", 74, "MRL-7002", "/proc/nowhere"),
    ],
)
def test_mistakes_found_before_the_start(override: str, exit_code: int, code: str, hint: str, directory: Path) -> None:
    overrides = override.split()
    outcome = train(QUICKSTART, directory, *overrides)
    assert outcome.code == exit_code, outcome.stderr
    assert hint in assert_one_message(outcome.stderr, code)
    assert not outcome.directory.exists()


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": \n', ":2"),
        ('{"prompt": "1+1=", "answer": "2"}\n{"question": "1+2="}\n', ":2"),
        ('{"prompt": "1+1="}\n', ":1"),
        ('{"prompt": "' + "1+" * 60 + '", "answer": "2"}\n', ":1"),
    ],
    ids=["cut row", "missing prompt", "missing answer", "too long"],
)
def test_bad_rows_are_located(rows: str, where: str, directory: Path) -> None:
    (directory / "rows.jsonl").write_text(rows)
    outcome = train(QUICKSTART, directory, "data.train=rows.jsonl", "warmup=null")
    assert outcome.code == 65, outcome.stderr
    assert f"rows.jsonl{where}" in assert_one_message(outcome.stderr, "MRL-2")
    assert not outcome.directory.exists()


def test_weights_that_are_not_there(directory: Path) -> None:
    """A model directory with a config and a tokenizer, but no weights."""
    model = directory / "model"
    model.mkdir()
    config = yaml.safe_load(QUICKSTART.read_text())["model"]["config"] | {"rms_norm_eps": 1e-6}
    (model / "config.json").write_text(json.dumps(config))
    outcome = train(QUICKSTART, directory, "model.path=model", "model.config=null")
    assert outcome.code == 66, outcome.stderr
    assert "safetensors" in assert_one_message(outcome.stderr, "MRL-4")


# -- found while it runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "code", "hint"),
    [("raises", "MRL-2102", "ZeroDivisionError"), ("not_a_number", "MRL-2103", "nan")],
)
def test_a_bad_reward_stops_the_run(reward: str, code: str, hint: str, directory: Path) -> None:
    outcome = train(QUICKSTART, directory, *SHORT, "warmup=null", f"reward=my_rewards:{reward}", "eval.every=0")
    assert outcome.code == 65, outcome.stderr
    message = assert_one_message(outcome.stderr, code)
    assert hint in message
    assert f"my_rewards:{reward}" in message


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_takes_the_others_with_it(victim: int, directory: Path) -> None:
    with running(directory, "step:3 ") as process:
        ranks = sorted(psutil.Process(process.pid).children(), key=lambda child: child.environ()["RANK"])
        assert len(ranks) == 2
        ranks[victim].kill()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 70
    assert f"rank {victim} was ended by signal SIGKILL" in assert_one_message(stderr, "MRL-9002")
    assert ranks_of(directory) == []


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_megarl(sent: signal.Signals, directory: Path) -> None:
    with running(directory, "step:1 ") as process:
        ranks = psutil.Process(process.pid).children()
        assert len(ranks) == 2
        if sent == signal.SIGINT:
            # while the first run lives, a second one may not have its directory
            second = subprocess.run(
                command(QUICKSTART, directory), capture_output=True, text=True, env=environment(), check=False
            )
            assert second.returncode == 73
            assert str(process.pid) in assert_one_message(second.stderr, "MRL-6001")
        process.send_signal(sent)
        process.communicate(timeout=60)
    _, alive = psutil.wait_procs(ranks, timeout=15)
    assert alive == []
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 75, signal.SIGINT: 75}[sent]


@pytest.mark.slow
def test_a_reader_that_leaves_does_not_end_the_run(directory: Path) -> None:
    line = " ".join(command(QUICKSTART, directory, *SHORT)) + " 2>&1 | head -2; exit ${PIPESTATUS[0]}"
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment(), check=False, cwd=directory
    )
    assert result.returncode == 0, result.stdout
    assert len((directory / "quickstart" / "metrics.jsonl").read_text().splitlines()) == 6


def test_a_module_that_exits_is_an_error(directory: Path) -> None:
    (directory / "leaves.py").write_text("import sys\nsys.exit()\n")
    outcome = train(QUICKSTART, directory, "reward=leaves:f")
    assert outcome.code == 64
    assert "SystemExit" in assert_one_message(outcome.stderr, "MRL-1302")


def test_a_broken_pipe_does_not_print_a_traceback(directory: Path) -> None:
    line = f"{' '.join(command(QUICKSTART, directory)[:3])} check {QUICKSTART} | head -1"
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment(), check=False, cwd=directory
    )
    assert result.stdout
    assert "Traceback" not in result.stderr
