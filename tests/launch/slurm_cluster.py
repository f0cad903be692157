"""A real Slurm for a test: the cluster of tools/slurm/two_nodes.sh, in namespaces that end with the test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ROOT, environment

# What a busy machine needs for a start with two imports of torch.
PATIENCE = 240.0
_DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "nsenter")
_NODES = ("n1", "n2")
TWO_NODES = ROOT / "tools" / "slurm" / "two_nodes.sh"


@dataclass(frozen=True)
class Job:
    """What slurmctld says of a job."""

    number: int
    state: str
    num_starts: int
    exit_code: str
    reason: str


@dataclass(frozen=True)
class Slurm:
    """A running cluster; commands are run inside of it."""

    root: Path
    first_process: int

    def run(self, *words: str, cwd: Path | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command of the user's on this cluster."""
        enter = ["nsenter", "--target", str(self.first_process), "--net", "--pid", "--mount", f"--wdns={cwd or ROOT}"]
        result = subprocess.run(
            [*enter, "--", *words],
            capture_output=True,
            text=True,
            env=environment(
                SLURM_CONF=str(self.root / "slurm.conf"),
                PYTHON=sys.executable,
                OMP_NUM_THREADS="1",
                PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            ),
        )
        if check:
            assert result.returncode == 0, f"{words}: {result.stdout}{result.stderr}"
        return result

    def submit(self, *words: str, cwd: Path) -> int:
        """sbatch with these words; returns the job's number."""
        return job_number(self.run("sbatch", *words, cwd=cwd).stdout)

    def job(self, number: int) -> Job:
        text = self.run("scontrol", "show", "job", "-o", str(number)).stdout
        found = dict(re.findall(r"(\w+)=(\S*)", text))
        return Job(number, found["JobState"], int(found["Restarts"]) + 1, found["ExitCode"], found["Reason"])

    def wait_for_nodes(self) -> None:
        """Until both nodes take jobs."""
        deadline = time.monotonic() + 60.0
        while (seen := self.run("sinfo", "-N", "-h", "-o", "%N %T", check=False).stdout).count(" idle\n") < len(_NODES):
            assert time.monotonic() < deadline, f"{seen}\n{self.logs()}"
            time.sleep(0.1)

    def wait_for(self, number: int, *states: str) -> Job:
        """Until the job is in one of these states."""
        deadline = time.monotonic() + PATIENCE
        while (job := self.job(number)).state not in states:
            assert time.monotonic() < deadline, f"{job}\n{self.logs()}"
            time.sleep(0.2)
        return job

    def wait_until_empty(self) -> None:
        """Until only the cluster itself is there. Ended processes may take a moment to leave."""
        deadline = time.monotonic() + 20.0
        while left := self._strangers():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _strangers(self) -> list[str]:
        """Commands of the processes that are neither Slurm's nor the first one or its sleep."""
        inside = os.readlink(f"/proc/{self.first_process}/ns/pid")
        found = []
        for process in psutil.process_iter(["name", "ppid", "cmdline"]):
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") != inside or process.info["name"].startswith(
                    ("slurm", "munge")
                ):
                    continue
                is_first = process.pid == self.first_process
                is_sleep = process.info["ppid"] == self.first_process and process.info["cmdline"][:1] == ["sleep"]
                if not is_first and not is_sleep:
                    found.append(" ".join(process.info["cmdline"] or []))
        return found

    def logs(self) -> str:
        """The last lines of the daemons."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in sorted(self.root.glob("*.log")))


def job_number(text: str) -> int:
    """What sbatch said: ``Submitted batch job 7``."""
    return int(text.split()[-1])


@contextmanager
def slurm_cluster(root: Path) -> Iterator[Slurm]:
    """Two idle nodes. Skips where the daemons or the rights are missing."""
    missing = [name for name in _DAEMONS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make setup-launchers` does it")
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    # The first process of the namespaces reaps what others leave behind, and ends, with everything, when it is killed.
    words = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", str(TWO_NODES)]
    process = subprocess.Popen([*words, "--inside", str(root), "sleep", "infinity"], env=environment())
    try:
        cluster = Slurm(root, _child_of(process))
        cluster.wait_for_nodes()
        yield cluster
    finally:
        process.kill()  # --kill-child: the first process, and with it the whole namespace
        process.wait()


def _child_of(process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 30.0
    while process.poll() is None:
        if children := psutil.Process(process.pid).children():
            return children[0].pid
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pytest.skip("no namespaces here: `unshare` says why")
