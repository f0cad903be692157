"""Who pastes docs/launching.md into a shell from top to bottom sees every command work, and has nothing left running.

Every ``bash`` block runs as it stands, with network and processes of its own, which are empty again when it ends.
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
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, Outcome, environment, reproducible

pytestmark = pytest.mark.slow

# What a busy machine needs to start a cluster and a job with two imports of torch.
PATIENCE = 240.0
SETUP = "make setup-launchers\n. .venv/bin/activate\n"
SYSTEM_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin"

# The first process of the namespaces runs a block, then lists who is left. Ended processes may take a moment to leave.
IN_NAMESPACES = r"""
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
            absent = [name for name in ("slurmctld", "slurmd", "sbatch") if not shutil.which(name, path=SYSTEM_PATH)]
            return f"{', '.join(absent)} not installed; `make setup-launchers` does it" if absent else ""
        return ""


def blocks() -> list[Block]:
    found = []
    heading = ""
    page = (ROOT / "docs" / "launching.md").read_text(encoding="utf-8")
    for title, text in re.findall(r"^#+ ([^\n]+)$|^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if title:
            heading = title
        else:
            found.append(Block(heading, text))
    return found


BLOCKS = blocks()
TO_RUN = [block for block in BLOCKS if block.text != SETUP]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name of the repository, for them to write into."""
    if shutil.which("ip", path=SYSTEM_PATH) is None or os.geteuid() != 0:
        pytest.skip("namespaces need root and iproute2; `make setup-launchers` installs the latter")
    if (tried := in_namespaces("true")).returncode:
        pytest.skip(f"no namespaces here: {tried.stderr.strip()}")
    copy = tmp_path_factory.mktemp("repository")
    for name in ("configs", "examples", "tools"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("work", "__pycache__"))
    shutil.copy(ROOT / ".gitignore", copy)  # says what Ray need not copy: runs/
    return copy


@pytest.fixture
def scratch() -> Iterator[Path]:
    """For Ray, which makes sockets below it: their paths must be short."""
    with tempfile.TemporaryDirectory(prefix="mrl-", dir="/tmp") as path:
        yield Path(path)


def in_namespaces(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    alone = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return subprocess.run([*alone, *words], capture_output=True, text=True, **options)  # type: ignore[call-overload]


def test_the_page_begins_with_what_installs_the_rest() -> None:
    """Whoever runs these tests has done this; it would reinstall the environment that they run in."""
    assert BLOCKS[0].text == SETUP
    assert BLOCKS.count(BLOCKS[0]) == 1
    assert "make setup-launchers\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_way_is_on_the_page() -> None:
    text = "".join(block.text for block in TO_RUN)
    for way in ("megarl train", "torchrun", "ray job submit", "megarl launch slurm", "megarl doctor"):
        assert f"\n{way} " in f"\n{text}"
    assert set(re.findall(r"examples/(two_nodes_\w+)/", text)) == {
        path.name for path in (ROOT / "examples").glob("two_nodes_*")
    }


@pytest.mark.parametrize("block", TO_RUN, ids=str)
def test_it_can_be_pasted(block: Block, tree: Path, scratch: Path) -> None:
    if block.missing:
        pytest.skip(block.missing)
    script = scratch / "block.sh"
    script.write_text(block.text)
    variables = environment(PATH=SYSTEM_PATH, HOME=str(scratch), RAY_TMPDIR=str(scratch / "ray"), OMP_NUM_THREADS="1")
    done = in_namespaces("bash", "-c", IN_NAMESPACES, "bash", script, cwd=tree, env=variables, timeout=PATIENCE)
    assert done.returncode == 0, f"{block.text}{done.stdout}{done.stderr}"
    if block.run_name:
        assert "\nstep:2 - " in done.stdout
        assert (tree / "runs" / block.run_name / "metrics.jsonl").is_file()


def test_all_of_them_gave_the_same_numbers(tree: Path) -> None:
    """Of the tests above; alone, it has nothing to compare."""
    found = sorted((tree / "runs").glob("*/metrics.jsonl"))
    if len(found) < 2:
        pytest.skip("fewer than two commands of the page have been run")
    ledgers = {path.parent.name: reproducible(Outcome(0, "", "", path.parent)) for path in found}
    first = next(iter(ledgers.values()))
    assert [name for name, ledger in ledgers.items() if ledger != first] == []
