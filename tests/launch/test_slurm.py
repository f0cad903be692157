"""sbatch on a real Slurm with two nodes: the ledger of megarl's own launcher, whatever happens on the way."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.ray_cluster import has_signal
from tests.e2e.runs import INTERRUPTED, QUICKSTART, ROOT, Outcome, environment, reproducible, train
from tests.launch.slurm_cluster import PATIENCE, Job, Slurm, job_number, slurm_cluster

pytestmark = pytest.mark.slow

# enough that nobody is too late to interrupt it: a start makes two or three steps before it hears of it
NUM_STEPS = 20
HANG_SECONDS = 6
SETTINGS = (*INTERRUPTED, f"run.num_steps={NUM_STEPS}", f"launch.hang_timeout_seconds={HANG_SECONDS}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ledger under megarl's own launcher, uninterrupted."""
    outcome = train(QUICKSTART, tmp_path_factory.mktemp("local"), *SETTINGS)
    assert outcome.code == 0, outcome.stderr
    assert len(reproducible(outcome)) == NUM_STEPS
    return reproducible(outcome)


@dataclass(frozen=True)
class Submitted:
    """A job in the hands of Slurm, and what it leaves in its directory."""

    slurm: Slurm
    number: int
    directory: Path

    @property
    def log(self) -> str:
        return (self.directory / f"quickstart-{self.number}.log").read_text()

    @property
    def ledger(self) -> list[str]:
        return reproducible(Outcome(0, "", "", self.directory / "quickstart"))

    @property
    def num_steps(self) -> int:
        path = self.directory / "quickstart" / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def ranks(self) -> dict[int, psutil.Process]:
        """By number. Slurm's own processes and the guards are none."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            if line[1:4] == ["-m", "megarl", "train"] and f"run.dir={self.directory}" in line:
                try:
                    found[int(process.environ()["SLURM_PROCID"])] = process
                except (psutil.Error, KeyError, OSError):
                    continue
        return found

    def wait_for_start(self, number: int) -> None:
        """Until the job trains for the so-manieth time. Slurm lets a requeued job wait until old credentials expire."""

        def has_started() -> bool:
            job = self.slurm.job(self.number)
            return job.num_starts == number and job.state == "RUNNING"

        self.wait(has_started, 0.2)
        before = self.num_steps
        self.wait(lambda: self.num_steps > before, 0.02)

    def wait_for_end(self, *states: str) -> Job:
        return self.slurm.wait_for(self.number, *states)

    def wait(self, condition: Callable[[], bool], poll_seconds: float) -> None:
        begin = asked = time.monotonic()
        while not condition():
            now = time.monotonic()
            if now - asked > 1.0:  # asking Slurm is work for a busy machine
                asked = now
                job = self.slurm.job(self.number)
                assert now - begin < PATIENCE, f"{job}\n{self.log}\n{self.slurm.logs()}"
                assert job.state in ("RUNNING", "PENDING", "COMPLETING"), self.log
            time.sleep(poll_seconds)

    def assert_nothing_is_left(self) -> None:
        """No rank and no guard, outside of the cluster as well as in it."""
        deadline = time.monotonic() + 20.0
        while left := [
            process
            for process in psutil.process_iter(["cmdline", "cwd"])
            if process.info["cwd"] == str(self.directory) and "megarl" in " ".join(process.info["cmdline"] or [])
        ]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def submitted(slurm: Slurm, directory: Path, *settings: str) -> Submitted:
    """As a user does it: render, check and submit with one command."""
    words = [str(QUICKSTART), "--nodes", "2", "--submit", f"run.dir={directory}", *SETTINGS, *settings]
    said = slurm.run("megarl", "launch", "slurm", *words, cwd=directory).stdout
    return Submitted(slurm, job_number(said), directory)


def test_three_warnings_and_a_lost_node_change_nothing(slurm: Slurm, expected: list[str], tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path)
    for start in range(1, 4):
        job.wait_for_start(start)
        slurm.run("scancel", "--signal=USR1", "--batch", str(job.number))
    job.wait_for_start(4)
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    slurm.run("scontrol", "update", "nodename=n2", "state=resume", check=False)
    end = job.wait_for_end("COMPLETED", "FAILED")
    assert (end.state, end.num_starts, end.exit_code) == ("COMPLETED", 5, "0:0"), job.log
    assert job.ledger == expected
    assert "[W" not in job.log  # warnings of torch about names of hosts
    assert re.findall(r": restart (\d)", job.log) == list("01234")
    assert job.log.count("goes back into the queue") == 3
    assert job.log.count("from checkpoints/step_") == 4
    job.assert_nothing_is_left()


def test_a_job_that_is_warned_before_its_first_step_ends(slurm: Slurm, tmp_path: Path) -> None:
    """It would go round for ever. The ranks listen already, and still meet or load."""
    slurm.wait_for_nodes()
    job = submitted(slurm, tmp_path)

    def all_listen() -> bool:
        ranks = job.ranks().values()
        return len(ranks) == 2 and all(has_signal(rank, "SigCgt", signal.SIGUSR1) for rank in ranks)

    job.wait(all_listen, 0.02)
    slurm.run("scancel", "--signal=USR1", "--batch", str(job.number))
    end = job.wait_for_end("COMPLETED", "FAILED")
    assert (end.state, end.num_starts, end.exit_code) == ("FAILED", 1, "76:0"), job.log
    # the warning finds them while they meet, or later
    assert re.search("MRL-8002 stopped by SIGUSR1 (at the start|before step 1 of .*, the first of this start)", job.log)
    assert job.log.splitlines()[-1].startswith(f"job {job.number} ends: no step was finished since restart 0")
    assert job.num_steps == 0
    job.assert_nothing_is_left()


def test_a_killed_and_a_stopped_rank_are_named_and_the_job_goes_on(
    slurm: Slurm, expected: list[str], tmp_path: Path
) -> None:
    slurm.wait_for_nodes()
    job = submitted(slurm, tmp_path)
    job.wait_for_start(1)
    job.ranks()[1].kill()
    end = job.wait_for_end("FAILED", "COMPLETED")
    # a step's exit code is the highest of its tasks': here that of the signal
    assert (end.state, end.exit_code) == ("FAILED", "137:0"), job.log
    assert "MRL-9002 rank 1 died on" in job.log
    job.assert_nothing_is_left()

    slurm.run("scontrol", "requeue", str(job.number))
    job.wait_for_start(2)
    stopped = job.ranks()[0]
    stopped.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    end = job.wait_for_end("FAILED", "COMPLETED")
    # the promise is the time-out and ten seconds; this machine may be busy
    assert time.monotonic() - begin < HANG_SECONDS + 20
    assert (end.state, end.exit_code) == ("FAILED", "69:0"), job.log
    assert "MRL-5301 rank 0 on" in job.log
    job.assert_nothing_is_left()

    slurm.run("scontrol", "requeue", str(job.number))
    assert job.wait_for_end("FAILED", "COMPLETED").state == "COMPLETED", job.log
    assert job.ledger == expected


def test_the_doctor_on_all_ranks_of_a_job(slurm: Slurm, tmp_path: Path) -> None:
    """Two ranks on each of two nodes, as the run has them."""
    slurm.wait_for_nodes()
    words = [str(QUICKSTART), "--nodes", "2", "--doctor", "--submit", f"run.dir={tmp_path}", "run.num_ranks=4"]
    number = job_number(slurm.run("megarl", "launch", "slurm", *words, cwd=tmp_path).stdout)
    end = slurm.wait_for(number, "COMPLETED", "FAILED")
    log = (tmp_path / f"quickstart-doctor-{number}.log").read_text()
    assert end.state == "COMPLETED", log
    assert log.startswith("megarl doctor: 4 ranks on 2 nodes (slurm)\n")
    assert "all 4 ranks reach each other" in log
    assert " 0 errors," in f" {log}".replace("\n", " ")


def test_torchrun_inside_of_srun(slurm: Slurm, expected: list[str], tmp_path: Path) -> None:
    slurm.wait_for_nodes()
    meeting = "--nnodes=2 --nproc-per-node=1 --node-rank=$SLURM_NODEID --master-addr=n1 --master-port=29517"
    program = shlex.join(["-m", "megarl", "train", str(QUICKSTART), f"run.dir={tmp_path}", *SETTINGS])
    task = f"exec {sys.executable} -m torch.distributed.run {meeting} --max-restarts=0 {program}"
    job = Submitted(
        slurm,
        slurm.submit(
            *("--nodes=2", "--ntasks-per-node=1", "--output=quickstart-%j.log"),
            f"--wrap=srun bash -c {shlex.quote(task)}",
            cwd=tmp_path,
        ),
        tmp_path,
    )
    assert job.wait_for_end("FAILED", "COMPLETED").state == "COMPLETED", job.log
    assert job.ledger == expected
    job.assert_nothing_is_left()


@pytest.mark.parametrize("template", sorted((ROOT / "tools" / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_slurm_takes_every_template(slurm: Slurm, template: Path) -> None:
    said = slurm.run("sbatch", "--test-only", str(template), str(QUICKSTART))
    assert re.search(r"Job \d+ to start at .* using 2 processors on nodes n\[1-2\]", said.stderr), said


def test_the_example_trains_on_two_nodes_of_its_own(slurm: Slurm, expected: list[str], tmp_path: Path) -> None:
    script = ROOT / "examples" / "two_nodes_slurm" / "on_one_machine.sh"
    done = subprocess.run(
        [script, QUICKSTART, f"run.dir={tmp_path}", *SETTINGS],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS="1", PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"),
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "job 1: COMPLETED, exit code 0:0"
    assert f"\nstep:{NUM_STEPS} - " in done.stdout
    assert done.stdout.startswith((tmp_path / "runs" / "job.log").read_text())
    assert reproducible(Outcome(0, "", "", tmp_path / "quickstart")) == expected
