"""kill -9 at every point of a save: the newest complete checkpoint is found, whole, and nothing else is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.store import CheckpointStore, newest_step
from megarl.core.faults import POINTS, reach
from tests.unit.one_rank import one_rank_world

SAVE_POINTS = [point for point in POINTS if point.startswith("save/")]
# From here on the new checkpoint has its name.
NUM_BEFORE = SAVE_POINTS.index("save/after-rename")
FILE_POINTS = ("save/snapshot", "save/staged", "save/file-half-written", "save/file-written", "save/file-synced")

Crash = Callable[..., list[int]]


@pytest.fixture(scope="module")
def world():
    with one_rank_world() as world:
        yield world


@pytest.fixture(scope="module")
def crash() -> Iterator[Crash]:
    """``crash(directory, saves, fault, num_ranks)``: the exit codes of ranks that saved until the fault met them."""
    command = [sys.executable, "-m", "tests.unit.checkpoint_crashes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(directory: Path, saves: list[tuple[int, float]], fault: str, num_ranks: int = 1) -> list[int]:
            order = {"directory": str(directory), "saves": saves, "fault": fault, "num_ranks": num_ranks}
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            statuses: list[int] = json.loads(process.stdout.readline())
            return statuses

        yield run
        process.stdin.close()


def found(directory: Path, world) -> tuple[int, float]:
    """Step and value of the checkpoint that a restarted run takes; nothing else may be left but older ones."""
    store = CheckpointStore(directory, world, keep=1)
    checkpoint = store.open_newest()
    assert checkpoint is not None
    value = checkpoint.progress["value"]
    assert torch.equal(checkpoint.read("w"), torch.full((3, 4), value))
    assert [path.name for path in directory.iterdir() if not path.name.startswith("step_0000")] == []
    assert newest_step(directory) == checkpoint.step
    # and saving goes on
    store.save(checkpoint.step + 1, [], {}, {}, wait=True)
    assert [path.name for path in directory.iterdir()] == [f"step_{checkpoint.step + 1:06d}"]
    return checkpoint.step, value


@pytest.mark.parametrize("point", SAVE_POINTS)
def test_killed_while_saving_the_next_step(crash, world, tmp_path, point, caplog):
    assert crash(tmp_path / "run", [(10, 1.0), (20, 2.0)], f"{point}=kill") == [-signal.SIGKILL]
    assert found(tmp_path / "run", world) == ((10, 1.0) if SAVE_POINTS.index(point) < NUM_BEFORE else (20, 2.0))
    assert caplog.records == []  # an interrupted save is nothing to be alarmed about


@pytest.mark.parametrize("point", [point for point in SAVE_POINTS if point != "save/removing"])
def test_killed_while_saving_a_step_again(crash, world, tmp_path, point):
    """The only checkpoint is replaced: there is one at any moment."""
    assert crash(tmp_path / "run", [(10, 1.0), (10, 2.0)], f"{point}=kill") == [-signal.SIGKILL]
    assert found(tmp_path / "run", world) == ((10, 1.0) if SAVE_POINTS.index(point) < NUM_BEFORE else (10, 2.0))


@pytest.mark.parametrize("point", FILE_POINTS)
def test_one_of_two_ranks_is_killed(crash, world, tmp_path, point):
    """The driver learns it from the closed socket, fails, and has made nothing visible."""
    statuses = crash(tmp_path / "run", [(10, 1.0), (20, 2.0)], f"{point}:1:20=kill", num_ranks=2)
    assert statuses == [1, -signal.SIGKILL]
    assert found(tmp_path / "run", world) == (10, 1.0)


@pytest.mark.parametrize("point", ["save/staged", "save/before-rename", "save/after-rename"])
def test_the_driver_of_two_ranks_is_killed(crash, world, tmp_path, point):
    statuses = crash(tmp_path / "run", [(10, 1.0), (20, 2.0)], f"{point}:0:20=kill", num_ranks=2)
    assert statuses == [-signal.SIGKILL, 1]
    assert found(tmp_path / "run", world) == ((20, 2.0) if point == "save/after-rename" else (10, 1.0))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("action", ["enospc", "raise"])
def test_one_of_two_ranks_cannot_write(crash, world, tmp_path, rank, action):
    """Both fail, neither hangs."""
    fault = f"save/file-half-written:{rank}:20={action}"
    assert crash(tmp_path / "run", [(10, 1.0), (20, 2.0)], fault, num_ranks=2) == [1, 1]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_000010"]
    assert found(tmp_path / "run", world) == (10, 1.0)


def test_a_fault_hits_its_rank_and_step_only(monkeypatch):
    reach("save/staged", rank=0, step=1)
    monkeypatch.setenv("MEGARL_FAULT", "save/staged:1:7=enospc")
    for rank, step in ((0, 7), (1, 6), (1, None)):
        reach("save/staged", rank=rank, step=step)
    reach("save/snapshot", rank=1, step=7)
    with pytest.raises(OSError, match="No space left on device"):
        reach("save/staged", rank=1, step=7)
    monkeypatch.setenv("MEGARL_FAULT", "save/staged=raise")
    with pytest.raises(RuntimeError, match="fault at save/staged"):
        reach("save/staged", rank=3)


@pytest.mark.parametrize("text", ["save/nowhere=kill", "save/staged=explode", "save/staged"])
def test_a_misspelt_fault_is_an_error(monkeypatch, text):
    """A test that arms nothing would pass."""
    monkeypatch.setenv("MEGARL_FAULT", text)
    with pytest.raises(ValueError, match="is not a fault"):
        reach("save/staged", rank=0)
