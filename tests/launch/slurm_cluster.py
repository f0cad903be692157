"""A real Slurm for a test: slurmctld and two slurmd on loopback, in namespaces that end with the test.

Both nodes are this machine: Slurm's ``-N`` lets one host play several nodes, under names that only the cluster's own
/etc/hosts knows. Nothing in there can reach another network, and nothing outlives its first process.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ROOT, environment

# What a busy machine needs for a start with two imports of torch.
PATIENCE = 240.0
_DAEMONS = ("slurmctld", "slurmd", "sbatch", "ip", "unshare", "nsenter")
_NODES = ("n1", "n2")

# auth/none: everybody in the namespace is root. cred_expire decides how long a requeued job waits.
_CONFIG = """
ClusterName=megarl
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
SlurmctldPort=16817
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobRequeue=1
KillWait=5
MailProg=/bin/true
SchedulerParameters=sched_interval=1,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=localhost NodeAddr=10.78.0.1 Port=16901 CPUs=2 RealMemory=4000 State=UNKNOWN
NodeName=n2 NodeHostname=localhost NodeAddr=10.78.0.2 Port=16902 CPUs=2 RealMemory=4000 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

# Slurm looks up its own host under addresses that are not loopback, so lo has two more.
# The first process of the namespaces: it adopts and reaps what others leave behind, and ends when stdin is closed.
_FIRST_PROCESS = """
set -e
ip link set lo up
ip addr add 10.78.0.1/32 dev lo
ip addr add 10.78.0.2/32 dev lo
mount --bind "$1/hosts" /etc/hosts
export SLURM_CONF="$1/slurm.conf"
slurmctld -c -D >"$1/slurmctld.out" 2>&1 &
slurmd -D -N n1 >"$1/slurmd-n1.out" 2>&1 &
slurmd -D -N n2 >"$1/slurmd-n2.out" 2>&1 &
read -r _ || true
"""


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
            time.sleep(0.1)
        return job

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
    for name in ("state", *(f"spool/{node}" for node in _NODES)):
        (root / name).mkdir(parents=True)
    (root / "slurm.conf").write_text(_CONFIG.format(root=root))
    (root / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 n1\n10.78.0.2 n2\n")
    words = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    process = subprocess.Popen(
        [*words, "bash", "-c", _FIRST_PROCESS, "slurm", str(root)],
        stdin=subprocess.PIPE,
        env=environment(PATH=f"{os.environ['PATH']}:/usr/sbin:/sbin"),
    )
    try:
        cluster = Slurm(root, _child_of(process))
        cluster.wait_for_nodes()
        yield cluster
    finally:
        process.kill()  # --kill-child: the first process, and with it the whole namespace
        process.communicate()


def _child_of(process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 30.0
    while not (children := psutil.Process(process.pid).children()):
        assert time.monotonic() < deadline and process.poll() is None, "no namespaces here"
        time.sleep(0.01)
    return children[0].pid
