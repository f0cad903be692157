"""Who pastes docs/slurm.md into a shell on a cluster sees every job of it end well, also the one that starts Ray.

And ray.sbatch when its run fails: the job's exit code is megarl's, the log ends with the reason, and Ray is gone.
"""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.ray_cluster import held_until_asked
from tests.e2e.runs import INTERRUPTED, QUICKSTART, Outcome, reproducible, train
from tests.launch.pasted import Block, blocks, copy_of_the_repository, require_one_ledger, short_directory
from tests.launch.slurm_cluster import PATIENCE, Job, Slurm, slurm_cluster

pytestmark = pytest.mark.slow

BLOCKS = blocks("slurm.md")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_repository(tmp_path_factory.mktemp("repository"))


def paste(slurm: Slurm, text: str, tree: Path) -> list[Job]:
    """Into a shell on the cluster; returns its jobs once they have ended and nothing of them is left."""
    if "ray.sbatch" in text and importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make setup-launchers` does it")
    with short_directory() as scratch:
        shell = ["env", f"RAY_TMPDIR={scratch}/ray", "bash", "-euo", "pipefail", "-c"]
        said = slurm.run(*shell, text, cwd=tree).stdout
        numbers = [int(number) for number in re.findall(r"^Submitted batch job (\d+)$", said, re.MULTILINE)]
        jobs = [slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") for number in numbers]
        slurm.wait_until_empty()
    assert list(tree.glob(".*-ray-*")) == [], "the token of the cluster is gone"
    return jobs


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_it_can_be_pasted(block: Block, slurm: Slurm, tree: Path) -> None:
    jobs = paste(slurm, block.text, tree)
    assert len(jobs) == (block.run_name is not None)  # the doctor is no job
    for job in jobs:
        own = "megarl-ray" if "ray.sbatch" in block.text else block.run_name
        log = (tree / f"{own}-{job.number}.log").read_text()
        assert (job.state, job.exit_code) == ("COMPLETED", "0:0"), log
        assert "\nstep:2 - " in log
        devices = (tree / "runs" / str(block.run_name) / "devices.json").read_text()
        assert ('"node": 1' in devices) == ("--nodes 1" not in block.text)


def test_all_of_them_gave_the_same_numbers(tree: Path) -> None:
    require_one_ledger(tree)


def test_the_doctor_and_ray_are_on_the_page() -> None:
    text = "".join(block.text for block in BLOCKS)
    for words in ("megarl doctor ", "sbatch job.sbatch", "tools/slurm/ray.sbatch", "--submit"):
        assert words in text


def test_a_failed_run_on_ray_in_slurm_gives_its_exit_code_and_reason(slurm: Slurm, tree: Path) -> None:
    """A mistake that megarl finds on the cluster, at once."""
    sbatch = "sbatch tools/slurm/ray.sbatch configs/quickstart.yaml run.dir=$PWD/runs run.num_stepz=2"
    (job,) = paste(slurm, sbatch, tree)
    log = (tree / f"megarl-ray-{job.number}.log").read_text()
    assert (job.state, job.exit_code) == ("FAILED", "64:0"), log
    assert log.rstrip().splitlines()[-3].startswith("MRL-1001 command line run.num_stepz is not a setting."), log
    assert "goes back into the queue" not in log


def test_a_warned_run_on_ray_in_slurm_is_requeued_to_the_same_ledger(slurm: Slurm, tree: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make setup-launchers` does it")
    settings = (*INTERRUPTED, "run.num_steps=6")
    local = train(QUICKSTART, tmp_path, *settings)
    assert local.code == 0, local.stderr
    own = ("run.name=warned", f"run.dir={tree / 'warned'}")
    left = Outcome(0, "", "", tree / "warned" / "warned")
    with short_directory() as scratch:
        sbatch = ["env", f"RAY_TMPDIR={scratch}/ray", "sbatch", "--parsable", "tools/slurm/ray.sbatch"]
        number = int(slurm.run(*sbatch, "configs/quickstart.yaml", *own, *settings, cwd=tree).stdout)
        log = tree / f"megarl-ray-{number}.log"
        deadline = time.monotonic() + PATIENCE
        while not (path := left.directory / "metrics.jsonl").is_file() or path.read_text().count("\n") < 2:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.01)
        with held_until_asked(ranks_with(own[1])):
            slurm.run("scancel", "--signal=USR1", "--batch", str(number))
        end = slurm.wait_for(number, "COMPLETED", "FAILED", "TIMEOUT")
        slurm.wait_until_empty()
    assert (end.state, end.exit_code, end.num_starts) == ("COMPLETED", "0:0", 2), log.read_text()
    assert "\nMRL-8001 stopped by SIGTERM after step" in log.read_text()
    assert log.read_text().count("goes back into the queue") == 1
    assert reproducible(left) == reproducible(local)


def ranks_with(setting: str) -> list[psutil.Process]:
    """Rank processes that were started with this setting."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if line[1:4] == ["-m", "megarl", "train"] and setting in line:
            found.append(process)
    assert len(found) == 2, found
    return found
