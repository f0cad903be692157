"""torchrun on one node and on two: the ledger of megarl's own launcher, also after ranks were killed and stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.e2e.namespaces import Node, two_nodes
from tests.e2e.runs import INTERRUPTED, QUICKSTART, ROOT, Outcome, environment, reproducible, train

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
NUM_STEPS = 8
HANG_SECONDS = 6
SETTINGS = (*INTERRUPTED, f"run.num_steps={NUM_STEPS}", f"launch.hang_timeout_seconds={HANG_SECONDS}")
# After a hang was found everything ends within this time (docs/launching.md), on a busy machine too: with four more
# busy processes on two cores it takes one to three.
PROMISED_SECONDS = 10
# What a busy machine needs for a start with two imports of torch.
PATIENCE = 240.0


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ledger under megarl's own launcher, uninterrupted."""
    outcome = train(QUICKSTART, tmp_path_factory.mktemp("local"), *SETTINGS)
    assert outcome.code == 0, outcome.stderr
    assert len(reproducible(outcome)) == NUM_STEPS
    return reproducible(outcome)


def program(directory: Path) -> list[str]:
    return ["-m", "megarl", "train", str(QUICKSTART), f"run.dir={directory}", *SETTINGS]


@contextmanager
def started(commands: Sequence[list[str]], directory: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The commands, one per node; nothing of them is left afterwards."""
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=directory,
            env=environment(OMP_NUM_THREADS="1"),
        )
        for command in commands
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ranks_in(directory: Path) -> dict[int, psutil.Process]:
    """The ranks of a run, by number; guards are not ranks."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if f"run.dir={directory}" in line and "torch.distributed.run" not in line:
            try:
                found[int(process.environ()["RANK"])] = process
            except (psutil.Error, KeyError, OSError):
                continue
    return found


def guards_in(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if "megarl.launch.guard" in (process.info["cmdline"] or []) and process.info["cwd"] == str(directory):
            found.append(process)
    return found


def wait_for_step(step: int, directory: Path, processes: Sequence[subprocess.Popen[str]]) -> None:
    ledger = directory / "quickstart" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not ledger.is_file() or ledger.read_text().count("\n") < step:
        assert time.monotonic() < deadline, "the step did not come"
        assert all(process.poll() is None for process in processes), processes[0].communicate()[0]
        time.sleep(0.01)


def assert_nothing_is_left(directory: Path) -> None:
    deadline = time.monotonic() + 15.0
    while guards_in(directory) or ranks_in(directory):
        assert time.monotonic() < deadline, (guards_in(directory), ranks_in(directory))
        time.sleep(0.05)


def outcome_in(directory: Path, code: int, stdout: str) -> Outcome:
    return Outcome(code, stdout, "", directory / "quickstart")


def test_one_node_goes_on_by_itself_after_a_rank_was_killed(expected: list[str], tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", *program(tmp_path)]
    with started([command], tmp_path) as processes:
        wait_for_step(2, tmp_path, processes)
        ranks_in(tmp_path)[1].kill()
        output, _ = processes[0].communicate(timeout=PATIENCE)
    assert processes[0].returncode == 0, output
    assert "MRL-9002 rank 1 died on" in output
    assert "from checkpoints/step_" in output
    assert reproducible(outcome_in(tmp_path, 0, output)) == expected
    assert_nothing_is_left(tmp_path)
    # one voice: what rank 1 had to say is in its log
    assert output.count("megarl 0") == 2
    assert (tmp_path / "quickstart" / "logs" / "rank_1.log").is_file()


def test_the_ranks_end_with_their_agent(expected: list[str], tmp_path: Path) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node=2", *program(tmp_path)]
    with started([command], tmp_path) as processes:
        wait_for_step(2, tmp_path, processes)
        processes[0].kill()
        output, _ = processes[0].communicate(timeout=PATIENCE)  # to the end of who else can write there
    assert "MRL-9004 the launcher's process on" in output
    assert_nothing_is_left(tmp_path)
    resumed = train(QUICKSTART, tmp_path, *SETTINGS)
    assert resumed.code == 0, resumed.stderr
    assert reproducible(resumed) == expected


def on_two_nodes(nodes: tuple[Node, Node], directory: Path) -> list[list[str]]:
    """As in docs/launching.md: the first node is told that it is the host."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes[0].address}:29555", "--rdzv-id=test"]
    return [
        node.command(
            *TORCHRUN,
            "--nnodes=2",
            "--nproc-per-node=1",
            *meeting,
            f"--rdzv-conf=is_host={int(node is nodes[0])}",
            f"--local-addr={node.address}",
            *program(directory),
        )
        for node in nodes
    ]


def by_the_example(nodes: tuple[Node, Node], directory: Path) -> list[list[str]]:
    """A static master: the first node's address, and a number for every node."""
    script = str(ROOT / "examples" / "two_nodes_torchrun" / "run.sh")
    settings = [str(QUICKSTART), f"run.dir={directory}", *SETTINGS]
    return [
        node.command("env", f"PYTHON={sys.executable}", script, str(number), "2", "1", nodes[0].address, *settings)
        for number, node in enumerate(nodes)
    ]


def test_two_nodes_one_of_which_is_stopped(expected: list[str], tmp_path: Path) -> None:
    with two_nodes() as nodes:
        with started(on_two_nodes(nodes, tmp_path), tmp_path) as processes:
            wait_for_step(2, tmp_path, processes)
            stopped = ranks_in(tmp_path)[1]
            stopped.send_signal(signal.SIGSTOP)
            begin = time.monotonic()
            _, alive = psutil.wait_procs([stopped, *ranks_in(tmp_path).values()], timeout=PATIENCE)
            seconds = time.monotonic() - begin
            outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        assert alive == []
        assert seconds < HANG_SECONDS + PROMISED_SECONDS
        assert "MRL-5301 rank 1 on" in outputs[0], outputs
        assert "is stopped" in outputs[0]
        assert "step:" not in outputs[0].partition("MRL-5301")[2]  # it is continued to end, not to go on
        assert "MRL-" not in outputs[1]
        assert_nothing_is_left(tmp_path)
        logs = tmp_path / "quickstart" / "logs"
        for rank in range(2):
            assert "megarl/run/loop.py" in (logs / f"stacks_rank_{rank}.txt").read_text()
        # the other way to meet, as in the example, goes on with the run
        with started(by_the_example(nodes, tmp_path), tmp_path) as processes:
            outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    assert reproducible(outcome_in(tmp_path, 0, outputs[0])) == expected
    devices = json.loads((tmp_path / "quickstart" / "devices.json").read_text())
    assert [row["node"] for row in devices] == [0, 1]
    assert os.listdir(logs).count("rank_1.log") == 1


def test_a_stopped_driver_under_the_local_launcher(expected: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *program(tmp_path)]
    with started([command], tmp_path) as processes:
        wait_for_step(2, tmp_path, processes)
        driver = next(
            child for child in psutil.Process(processes[0].pid).children() if child.environ().get("RANK") == "0"
        )
        driver.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        output, _ = processes[0].communicate(timeout=PATIENCE)
        assert time.monotonic() - begin < HANG_SECONDS + PROMISED_SECONDS
    assert processes[0].returncode == 69, output
    assert "MRL-5301 rank 0 on" in output
    assert "is stopped" in output
    assert not driver.is_running()
    assert "megarl/run/loop.py" in (tmp_path / "quickstart" / "logs" / "stacks_rank_0.txt").read_text()
    resumed = train(QUICKSTART, tmp_path, *SETTINGS)
    assert resumed.code == 0, resumed.stderr
    assert reproducible(resumed) == expected
