"""A real Ray cluster of two nodes for a module of tests, in namespaces of its own. Needs root, iproute2 and Ray."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import ROOT, environment

# What a busy machine needs to start two nodes, or a job with two imports of torch.
PATIENCE = 240.0


@dataclass(frozen=True)
class RayCluster:
    """Commands are run as on a machine of the cluster. ``process`` is the first of its processes."""

    process: psutil.Process
    variables: dict[str, str]

    def start(self, directory: Path, *words: str) -> subprocess.Popen[str]:
        inside = ["nsenter", "-t", str(self.process.pid), "-n", "-p", "-m", f"--wd={directory}"]
        return subprocess.Popen(
            [*inside, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.variables
        )

    def run(self, directory: Path, *words: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(directory, *words)
        try:
            output, _ = process.communicate(timeout=PATIENCE)
        finally:
            process.kill()
        return process.returncode, output

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those of megarl that are in the cluster, with one of these words in their command."""
        network = os.readlink(f"/proc/{self.process.pid}/ns/net")
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = process.info["cmdline"] or []
            is_megarl = any(word.rpartition("/")[2].startswith("megarl") for word in line)
            with suppress(OSError):
                if is_megarl and set(words) & set(line) and os.readlink(f"/proc/{process.pid}/ns/net") == network:
                    found.append(process)
        return found


@contextmanager
def held_until_asked(ranks: Sequence[psutil.Process]) -> Iterator[None]:
    """While somebody asks the job to stop: the ranks make no step until the request (SIGTERM) has reached them."""
    for rank in ranks:
        rank.suspend()
    yield
    deadline = time.monotonic() + PATIENCE
    while not all(has_signal(rank, "ShdPnd", signal.SIGTERM) for rank in ranks):
        assert time.monotonic() < deadline, "the request did not come"
        time.sleep(0.05)
    for rank in ranks:
        rank.resume()


def has_signal(process: psutil.Process, of: str, number: signal.Signals) -> bool:
    """Whether the signal waits for the process (ShdPnd), or is one that it listens to (SigCgt)."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    numbers = int(next(line for line in status.splitlines() if line.startswith(of)).split()[1], 16)
    return bool(numbers & 1 << number - 1)


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """By tools/ray/two_nodes.sh, one core per node. Nothing is left afterwards."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed; `make setup-launchers` does it")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("namespaces need root and iproute2; `make setup-launchers` installs the latter")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = str(ROOT / "tools" / "ray" / "two_nodes.sh")
    # the cluster lives until its standard input is closed
    starter = subprocess.Popen(
        [script, "sh", "-c", "env --null; printf 'END\\0'; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(PATH=path, OMP_NUM_THREADS="1"),
    )
    try:
        assert starter.stdout is not None
        said = b""
        while not said.endswith(b"END\0"):
            data = os.read(starter.stdout.fileno(), 65536)
            if not data:
                pytest.fail("the cluster did not start")
            said += data
        variables = dict(entry.split("=", 1) for entry in said.decode().split("\0") if "=" in entry)
        inside = next(
            process
            for process in psutil.Process(starter.pid).children(recursive=True)
            if "unshare" not in process.name()
        )
        yield RayCluster(inside, variables)
    finally:
        starter.communicate(timeout=PATIENCE)
