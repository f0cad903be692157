"""What one pastes from a page of the documentation, and where: a copy of the repository, and namespaces of its own.

Blocks of the language ``console`` need machines that a test does not have; tests/unit/test_docs.py checks their words.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT, Outcome, environment, reproducible

# What a busy machine needs to start a cluster and a job with two imports of torch.
PATIENCE = 240.0
SYSTEM_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"

# The first process of the namespaces runs a block, then lists who is left. Ended processes may take a moment to leave.
_IN_NAMESPACES = r"""
ip link set lo up
bash -euo pipefail "$1"
code=$?
for _ in $(seq 100); do
    left=
    for process in /proc/[0-9]*; do
        [ "$process" = /proc/1 ] || left+=$(tr '\0' ' ' 2>/dev/null <"$process/cmdline")
    done
    [ -n "$left" ] || exit "$code"
    sleep 0.1
done
echo "left running: $left" >&2
exit 99
"""


@dataclass(frozen=True)
class Block:
    """What one pastes at a time."""

    heading: str
    text: str

    def __str__(self) -> str:
        return self.heading

    @property
    def run_name(self) -> str | None:
        """The run that it leaves in runs/."""
        found = re.search(r"run\.name=(\w+)", self.text)
        return found[1] if found else None

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty if it can."""
        if re.search(r"\bray\b|two_nodes_ray", self.text) and importlib.util.find_spec("ray") is None:
            return "Ray is not installed; `make setup-launchers` does it"
        if "two_nodes_slurm" in self.text:
            absent = [
                name for name in ("slurmctld", "slurmd", "munged", "sbatch") if not shutil.which(name, path=SYSTEM_PATH)
            ]
            return f"{', '.join(absent)} not installed; `make setup-launchers` does it" if absent else ""
        return ""


def blocks(page: str) -> list[Block]:
    """All ``bash`` blocks of docs/``page``, in order."""
    found = []
    heading = ""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for title, block in re.findall(r"^#+ ([^\n]+)$|^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if title:
            heading = title
        else:
            found.append(Block(heading, block))
    return found


def copy_of_the_repository(directory: Path) -> Path:
    """What the commands name of it, for them to write into."""
    for name in ("configs", "examples", "tools"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("work", "__pycache__"))
    shutil.copy(ROOT / ".gitignore", directory)  # says what Ray need not copy: runs/
    return directory


def require_namespaces() -> None:
    """Skips where there are none."""
    if shutil.which("ip", path=SYSTEM_PATH) is None or os.geteuid() != 0:
        pytest.skip("namespaces need root and iproute2; `make setup-launchers` installs the latter")
    if (tried := _alone("true")).returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")


def paste(text: str, tree: Path) -> str:
    """Into a shell in namespaces of its own, which are empty again when it ends; returns its output."""
    with short_directory() as home:
        script = home / "pasted.sh"
        script.write_text(text)
        variables = environment(PATH=SYSTEM_PATH, HOME=str(home), RAY_TMPDIR=str(home / "ray"), OMP_NUM_THREADS="1")
        done = _alone("bash", "-c", _IN_NAMESPACES, "bash", script, cwd=tree, env=variables, timeout=PATIENCE)
    assert done.returncode == 0, f"{text}{done.stdout}{done.stderr}"
    return done.stdout


def require_one_ledger(tree: Path) -> None:
    """All runs in runs/, which other tests left there, gave the same numbers. Skips if there is nothing to compare."""
    found = sorted((tree / "runs").glob("*/metrics.jsonl"))
    if len(found) < 2:
        pytest.skip("fewer than two commands of the page have been run")
    ledgers = {path.parent.name: reproducible(Outcome(0, "", "", path.parent)) for path in found}
    first = next(iter(ledgers.values()))
    assert [name for name, ledger in ledgers.items() if ledger != first] == []


@contextmanager
def short_directory() -> Iterator[Path]:
    """For Ray, which makes sockets below it: their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="mrl-", dir="/tmp") as path:
        yield Path(path)


def _alone(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    alone = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run([*alone, *words], capture_output=True, text=True, **options)
