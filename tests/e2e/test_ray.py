"""`ray job submit` on two real nodes: the ledger of megarl's own launcher, also after a stop and a kill."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.ray_cluster import PATIENCE, RayCluster, held_until_asked, ray_cluster
from tests.e2e.runs import INTERRUPTED, QUICKSTART, Outcome, ledger, reproducible, train

pytestmark = pytest.mark.slow

NUM_STEPS = 12
SETTINGS = (*INTERRUPTED, f"run.num_steps={NUM_STEPS}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as found:
        yield found


@pytest.fixture(scope="module")
def expected(cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The ledger under megarl's own launcher, uninterrupted."""
    outcome = train(QUICKSTART, tmp_path_factory.mktemp("local"), *SETTINGS)
    assert outcome.code == 0, outcome.stderr
    return reproducible(outcome)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """What a user submits: a directory with a configuration. The runs are elsewhere."""
    (tmp_path / "project").mkdir()
    shutil.copy(QUICKSTART, tmp_path / "project" / "config.yaml")
    return tmp_path / "project"


def submit(name: str, project: Path, *overrides: str) -> list[str]:
    runs = f"run.dir={project.parent / 'runs'}"
    program = ["megarl", "launch", "ray", "config.yaml", runs, *SETTINGS, *overrides]
    return ["ray", "job", "submit", "--submission-id", name, "--working-dir", ".", "--", *program]


def outcome(project: Path, code: int, output: str) -> Outcome:
    return Outcome(code, output, "", project.parent / "runs" / "quickstart")


def processes_of(project: Path) -> dict[str, psutil.Process]:
    """Ranks by number, and the driver of the job."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if f"run.dir={project.parent / 'runs'}" in line and "submit" not in line:
            try:
                found[process.environ().get("RANK", "driver")] = process
            except (psutil.Error, OSError):
                continue
    return found


def wait_for_step(step: int, project: Path, job: subprocess.Popen[str]) -> None:
    lines = project.parent / "runs" / "quickstart" / "metrics.jsonl"
    deadline = time.monotonic() + PATIENCE
    while not lines.is_file() or lines.read_text().count("\n") < step:
        assert time.monotonic() < deadline, "the step did not come"
        assert job.poll() is None, job.communicate()[0]
        time.sleep(0.01)


def assert_nothing_is_left(cluster: RayCluster) -> None:
    """Neither a driver nor a rank nor a guard; the cluster itself stays."""
    deadline = time.monotonic() + 15.0
    while cluster.processes("-m", "launch"):
        assert time.monotonic() < deadline, cluster.processes("-m", "launch")
        time.sleep(0.05)


def test_two_nodes_give_the_same_ledger(cluster: RayCluster, expected: list[str], project: Path) -> None:
    code, output = cluster.run(project, *submit("same", project))
    assert code == 0, output
    done = outcome(project, code, output)
    assert reproducible(done) == expected
    assert len(done.steps) == NUM_STEPS  # each starts a line
    assert '"node": 1' in (done.directory / "devices.json").read_text()
    assert_nothing_is_left(cluster)


def stop_job(cluster: RayCluster, project: Path, name: str) -> None:
    """Steps are faster than Ray's commands: the ranks wait until the request has reached them."""
    ranks = [process for number, process in processes_of(project).items() if number != "driver"]
    with held_until_asked(ranks):
        code, output = cluster.run(project, "ray", "job", "stop", "--no-wait", name)
        assert code == 0, output


def test_stopped_and_killed_and_still_the_same(cluster: RayCluster, expected: list[str], project: Path) -> None:
    job = cluster.start(project, *submit("stopped", project))
    wait_for_step(2, project, job)
    stop_job(cluster, project, "stopped")
    output, _ = job.communicate(timeout=PATIENCE)
    assert "\nMRL-8001 stopped by SIGTERM" in output
    assert_nothing_is_left(cluster)
    num_steps = len(outcome(project, 0, output).steps)
    assert 2 <= num_steps < 6

    job = cluster.start(project, *submit("without-driver", project))
    wait_for_step(num_steps + 1, project, job)
    processes_of(project)["driver"].kill()
    output, _ = job.communicate(timeout=PATIENCE)
    assert "from checkpoints/step_" in output
    assert job.returncode == 1
    assert_nothing_is_left(cluster)

    num_steps = len(ledger(outcome(project, 0, "")))
    job = cluster.start(project, *submit("without-rank", project))
    wait_for_step(num_steps + 1, project, job)
    processes_of(project)["1"].kill()
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert "\nMRL-9002 rank 1 died on" in output
    assert "\nRestart 1 of 3: all ranks go on from the last checkpoint." in output
    assert reproducible(outcome(project, 0, output)) == expected
    assert_nothing_is_left(cluster)


def test_rewards_on_a_node_without_ranks_are_the_same(cluster: RayCluster, project: Path, tmp_path: Path) -> None:
    """A function of the user's, in the directory that is submitted. Then its relay is lost, and the ranks go on."""
    (project / "own_rewards.py").write_text(
        "def score(prompt, sample):\n"
        "    return float(sample.response.strip() == prompt.answer) + len(sample.response) / 64\n"
    )
    own = ("run.num_ranks=1", "reward=own_rewards:score", "scoring.num_workers=1")
    local = train(QUICKSTART, tmp_path / "local", *SETTINGS, *own, cwd=project)
    assert local.code == 0, local.stderr
    job = cluster.start(project, *submit("rewards", project, *own, "launch.reward_nodes=1"))
    wait_for_step(2, project, job)
    relays = [process for process in cluster.processes("-m") if "megarl.rewards.relay" in process.cmdline()]
    assert len(relays) == 1
    workers = [process for process in relays[0].children() if "megarl.rewards.worker" in process.cmdline()]
    assert workers, "it is there that rewards are computed"
    relays[0].kill()
    output, _ = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, output
    assert "MRL-5324" in output
    assert "\nRestart 1 of 3: all ranks go on from the last checkpoint." in output
    assert reproducible(outcome(project, 0, output)) == reproducible(local)
    assert_nothing_is_left(cluster)


def test_bad_data_is_told_in_the_last_lines_and_not_tried_again(cluster: RayCluster, project: Path) -> None:
    (project / "bad.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": \n')
    code, output = cluster.run(project, *submit("bad", project, "data.train=bad.jsonl"))
    assert code == 1
    assert "failed with exit code 65" in output
    assert "MRL-2" in "\n".join(output.rstrip().splitlines()[-12:])
    assert "Restart" not in output
    assert_nothing_is_left(cluster)


def test_a_cluster_that_is_too_small_is_told_in_time(cluster: RayCluster, project: Path) -> None:
    settings = [f"run.dir={project.parent}", "run.num_ranks=4", "launch.join_timeout_seconds=1"]
    code, output = cluster.run(project, "megarl", "launch", "ray", "config.yaml", *settings)
    assert code == 69, output
    assert "MRL-5321 the run needs 4 nodes with 1 CPU each, and the cluster did not give them within 1 s." in output
    assert "2 nodes: 127.0.0.1 with 1, 127.0.0.1 with 1; 2 are free." in output


def test_the_doctor_on_all_ranks_of_a_cluster(cluster: RayCluster, project: Path) -> None:
    runs = project.parent / "runs"
    program = ["megarl", "launch", "ray", "config.yaml", "--doctor", f"run.dir={runs}"]
    code, output = cluster.run(project, *program)
    assert code == 0, output
    assert "\nmegarl doctor: 2 ranks on 2 nodes (ray)\n" in f"\n{output}"  # Ray may have logged something before
    assert "all 2 ranks reach each other" in output
    (project.parent / "afile").write_text("")
    code, output = cluster.run(project, *program[:-1], f"run.dir={project.parent}/afile/runs")
    assert code == 69, output
    assert "a file is in its place" in output
    assert "MRL-5305 not ready to train: " in output
    assert "Restart" not in output
    assert_nothing_is_left(cluster)


def test_the_cluster_turns_strangers_away(cluster: RayCluster, project: Path) -> None:
    question = "from megarl.launch.ray_plan import asks_for_token; print(asks_for_token('127.0.0.1:8265', None))"
    assert cluster.run(project, sys.executable, "-c", question) == (0, "True\n")
    # a shell without the token cannot submit
    code, output = cluster.run(project, "env", "RAY_AUTH_TOKEN_PATH=", "RAY_AUTH_MODE=disabled", "ray", "job", "list")
    assert code != 0, output
