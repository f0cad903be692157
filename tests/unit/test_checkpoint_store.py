"""Saving and finding checkpoints on one rank: commit, retention, full disks."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.directory import steps_present
from megarl.checkpoint.store import CheckpointStore, newest_step, open_checkpoint
from megarl.core.errors import MissingInputError, StorageError
from megarl.core.faults import POINTS
from tests.unit.checkpoints import numbers, whole
from tests.unit.one_rank import one_rank_world

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def world():
    with one_rank_world() as world:
        yield world


@pytest.fixture
def store(world, tmp_path):
    return CheckpointStore(tmp_path / "run" / "checkpoints", world, keep=2)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "run" / "checkpoints"


def save(store: CheckpointStore, step: int, *, wait: bool = True) -> None:
    """All elements of w are the step."""
    store.save(step, [whole("w", torch.full((3, 2), float(step)))], {"step": step}, {}, wait=wait)


def value(store: CheckpointStore) -> float:
    checkpoint = store.open_newest()
    assert checkpoint is not None
    assert checkpoint.progress == {"step": checkpoint.step}
    target = torch.zeros(3, 2)
    checkpoint.fill([whole("w", target)])
    assert torch.equal(target, torch.full((3, 2), float(checkpoint.step)))
    return checkpoint.step


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_without_a_checkpoint_there_is_none(store, directory):
    assert store.open_newest() is None
    assert newest_step(directory) is None
    assert not directory.exists()
    with pytest.raises(MissingInputError, match=r"^MRL-4201 .* has no checkpoint\.\nThere is none yet\."):
        open_checkpoint(directory, None)


def test_everything_comes_back(store):
    tensors = {
        "half": numbers(5, 3, dtype=torch.bfloat16),
        "single": numbers(7),
        "bytes": numbers(3, dtype=torch.uint8),
        "long": numbers(2, dtype=torch.int64),
        "number": torch.tensor(1.5, dtype=torch.float64),
        "nothing": torch.zeros(0, 4),
    }
    progress = {"step": 1, "best": -math.inf, "names": ["é", "\ud800", "a\nb"], "nested": {"x": [1, 0.1, None, True]}}
    state = {"cpu": torch.arange(5, dtype=torch.uint8), "python": torch.tensor([[2**62, -1]])}
    store.save(1, [whole(name, tensor) for name, tensor in tensors.items()], progress, state, wait=True)
    checkpoint = store.open_newest()
    assert checkpoint is not None
    assert checkpoint.progress == progress
    assert {name: size for name, size in checkpoint.layout.items() if size != 1} == {}
    assert checkpoint.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
    back = checkpoint.rank_state(0)
    assert back is not None
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_the_loop_may_change_its_state_at_once(store, directory, monkeypatch):
    """A save without waiting has copied everything when it returns, and is seen only when it is complete."""
    may_write = threading.Event()
    real_mkdir = Path.mkdir
    monkeypatch.setattr(Path, "mkdir", lambda *args, **kw: (may_write.wait(), real_mkdir(*args, **kw)))
    tensor, progress = torch.ones(4), {"step": 1, "seen": [1]}
    store.save(1, [whole("w", tensor)], progress, {}, wait=False)
    tensor.fill_(-1)
    progress["seen"].append(2)
    assert newest_step(directory) is None
    may_write.set()
    store.finish()
    checkpoint = open_checkpoint(directory, 1)
    assert torch.equal(checkpoint.read("w"), torch.ones(4))
    assert checkpoint.progress == {"step": 1, "seen": [1]}


def test_saved_memory_can_still_be_offloaded(store):
    """torch never again resizes a storage that numpy saw."""
    tensor = numbers(8)
    store.save(1, [whole("w", tensor)], {}, {"rng": tensor}, wait=True)
    checkpoint = store.open_newest()
    assert checkpoint is not None
    checkpoint.fill([whole("w", tensor)])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="w is offloaded"):
        store.save(2, [whole("w", tensor)], {}, {}, wait=True)


def test_the_newest_and_the_best_are_kept(store, directory):
    for step in (2, 4, 6, 8):
        store.retain(2 if step < 8 else 6)
        save(store, step, wait=step % 4 == 0)
        store.finish()
        assert steps_present(directory) == {2: [2], 4: [2, 4], 6: [2, 4, 6], 8: [6, 8]}[step]
    assert names(directory) == ["step_000006", "step_000008"]
    assert newest_step(directory) == value(store) == 8
    with pytest.raises(MissingInputError, match=r"^MRL-4201 .* has no checkpoint of step 2\.\nThere are: 6, 8\."):
        open_checkpoint(directory, 2)


def test_a_step_that_is_saved_again_replaces_the_first(store, directory):
    store.save(1, [whole("w", torch.zeros(4))], {"is_last": False}, {}, wait=False)
    store.save(1, [whole("w", torch.ones(4))], {"is_last": True}, {}, wait=False)
    store.finish()
    checkpoint = store.open_newest()
    assert checkpoint is not None
    assert checkpoint.progress == {"is_last": True}
    assert torch.equal(checkpoint.read("w"), torch.ones(4))
    assert names(directory) == ["step_000001"]


def test_foreign_names_are_no_checkpoints(store, directory):
    save(store, 5)
    for name in ("step_000009.bad", "step_9", "latest", "step_000007x"):
        (directory / name).mkdir()
    (directory / "newest").symlink_to("step_000099")
    assert value(store) == 5
    assert len(names(directory)) == 6


def test_everything_is_on_the_disk_before_it_has_its_name(store, directory, monkeypatch):
    """After a power cut the name may be there only if all it stands for is."""
    order: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(fd: int) -> None:
        real_fsync(fd)
        order.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")

    def rename(source, target) -> None:
        real_rename(source, target)
        order.append(f"rename to {Path(target).name}")

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    save(store, 1)
    staging = order[3].removeprefix("sync ")
    assert staging.startswith(".staging_step_000001_")
    assert order == [
        "sync run",  # checkpoints/ itself is new
        "sync rank_00000.safetensors",
        "sync manifest.json",
        f"sync {staging}",
        "rename to step_000001",
        "sync checkpoints",
    ]


# From the first byte to the moment when the new checkpoint has its name.
WRITES = POINTS[POINTS.index("save/staged") : POINTS.index("save/after-rename")]


@pytest.mark.parametrize("point", WRITES)
def test_a_full_disk_loses_nothing(store, directory, point, monkeypatch):
    save(store, 1)
    save(store, 2)
    monkeypatch.setenv("MEGARL_FAULT", f"{point}=enospc")
    save(store, 2, wait=False)
    with pytest.raises(StorageError) as caught:
        save(store, 3)
    text = str(caught.value)
    assert text.startswith("MRL-7004 the checkpoint of step 2 could not be written: ")
    assert "No space left on device" in text
    assert f"It needs {(directory / 'step_000002' / 'rank_00000.safetensors').stat().st_size:,} bytes" in text
    assert "run/checkpoints has " in text
    assert names(directory) == ["step_000001", "step_000002"]
    monkeypatch.delenv("MEGARL_FAULT")
    assert value(store) == 2
    save(store, 3)  # there is space again
    assert value(store) == 3


def test_an_error_of_ours_is_not_called_a_full_disk(store, directory, monkeypatch):
    save(store, 1)
    monkeypatch.setenv("MEGARL_FAULT", "save/file-written:0:2=raise")
    with pytest.raises(RuntimeError, match="fault at save/file-written"):
        save(store, 2)
    assert names(directory) == ["step_000001"]


def test_what_cannot_be_removed_is_told(store, monkeypatch):
    for step in (1, 2):
        save(store, step)
    monkeypatch.setenv("MEGARL_FAULT", "save/removing=enospc")
    with pytest.raises(
        StorageError, match=r"^MRL-7006 the checkpoint of step 3 is safe, but older ones cannot be removed"
    ):
        save(store, 3)
    assert value(store) == 3


def test_a_place_that_cannot_be_written(world, tmp_path):
    (tmp_path / "run").write_text("not a directory")
    store = CheckpointStore(tmp_path / "run" / "checkpoints", world, keep=1)
    with pytest.raises(
        StorageError, match=r"^MRL-7004 the checkpoint of step 1 could not be written: .*Not a directory"
    ):
        save(store, 1)


FILL_THE_DISK = """
import sys, torch
from pathlib import Path
from megarl.checkpoint.store import CheckpointStore
from megarl.core.errors import StorageError
from tests.unit.checkpoints import whole
from tests.unit.one_rank import one_rank_world

directory = Path(sys.argv[1]) / "checkpoints"
def save(step, size):
    store.save(step, [whole("w", torch.full((size,), float(step)))], {}, {}, wait=True)
with one_rank_world() as world:
    store = CheckpointStore(directory, world, keep=2)
    save(1, 50_000)   # 200 kB of 1 MB
    for _ in range(3):  # a failed save leaves its space to the next one
        try:
            save(2, 250_000)
            sys.exit("1 MB fit into 0.8 MB")
        except StorageError as error:
            print(error)
    assert [path.name for path in directory.iterdir()] == ["step_000001"]
    assert store.open_newest().step == 1
    save(2, 100_000)  # 400 kB do fit
    assert store.open_newest().step == 2
"""


def test_a_disk_that_is_really_full(tmp_path):
    mount = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", str(tmp_path)]
    trial = subprocess.run([*command, "true", ""], capture_output=True, check=False)
    if trial.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {trial.stderr.decode(errors='replace')[:80]}")
    done = subprocess.run(
        [*command, sys.executable, FILL_THE_DISK],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    what = "MRL-7004 the checkpoint of step 2 could not be written: rank_00000.safetensors: No space left on device."
    assert lines.count(what) == 3
    needed = [line for line in lines if line.startswith("It needs 1,000,")]
    assert len(needed) == 3
    # what is free is told after the failed save has been removed: 1 MiB without the first checkpoint
    assert all(800_000 <= int(line.partition(" has ")[2].split()[0].replace(",", "")) < 850_000 for line in needed)
