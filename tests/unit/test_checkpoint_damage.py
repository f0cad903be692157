"""Whatever happens to a file of the newest checkpoint is noticed before anything of it is used."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.manifest import read_manifest
from megarl.checkpoint.store import CheckpointStore, open_checkpoint
from megarl.core.errors import DataError, StorageError
from tests.unit.checkpoints import cut, numbers, save_layout
from tests.unit.one_rank import one_rank_world

TENSORS = {"actor/w": numbers(6, 5), "actor/v": numbers(40, dtype=torch.bfloat16), "critic/w": numbers(3, 3)}
STATE_OF_STEP = {step: {name: tensor + step for name, tensor in TENSORS.items()} for step in (10, 20, 30)}


@pytest.fixture(scope="module")
def world():
    with one_rank_world() as world:
        yield world


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Checkpoints of steps 10, 20 and 30, each of three ranks."""
    directory = tmp_path_factory.mktemp("pristine")
    for step, tensors in STATE_OF_STEP.items():
        save_layout(directory, step, cut(tensors, 3, random.Random(step)))
    return directory


@pytest.fixture
def directory(pristine, tmp_path) -> Path:
    shutil.copytree(pristine, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def flip_bit(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def truncate(path: Path, draw: random.Random) -> None:
    os.truncate(path, draw.randrange(1, path.stat().st_size))


def append(path: Path, draw: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(draw.randbytes(draw.randint(1, 9)))


def overwrite(path: Path, draw: random.Random) -> None:
    size = path.stat().st_size
    path.write_bytes(draw.randbytes(size))


def swap(path: Path, draw: random.Random) -> None:
    """Two files of the checkpoint change places."""
    other = draw.choice([one for one in path.parent.iterdir() if one != path])
    path.rename(path.with_suffix(".tmp"))
    other.rename(path)
    path.with_suffix(".tmp").rename(other)


def exchange_bytes(path: Path, draw: random.Random) -> None:
    """The same bytes in another order."""
    content = bytearray(path.read_bytes())
    first = draw.randrange(len(content) - 1)
    second = next(
        place for place in range(first + 1, len(content) * 2) if content[place % len(content)] != content[first]
    )
    content[first], content[second % len(content)] = content[second % len(content)], content[first]
    path.write_bytes(content)


def from_older(path: Path, draw: random.Random) -> None:
    """The file of another, intact checkpoint."""
    shutil.copy(path.parent.with_name("step_000020") / path.name, path)


def link(path: Path, draw: random.Random) -> None:
    """Right content, but not this checkpoint's file: it could change at any time."""
    path.rename(path.parent.parent / path.name)
    path.symlink_to(path.parent.parent / path.name)


def make_directory(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path, draw: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


MUTATIONS: list[Callable[[Path, random.Random], None]] = [
    flip_bit, flip_bit, truncate, append, overwrite, swap, exchange_bytes, from_older,
    lambda path, draw: path.unlink(),
    lambda path, draw: path.write_bytes(b""),
    link, make_directory, make_pipe,
]  # fmt: skip


def mutations() -> list[tuple[int, str]]:
    """More than forty: every kind on every file."""
    files = ["rank_00000.safetensors", "rank_00001.safetensors", "rank_00002.safetensors", "manifest.json"]
    return [(seed, files[seed % len(files)]) for seed in range(len(files) * len(MUTATIONS))]


@pytest.mark.parametrize(("seed", "file"), mutations())
def test_a_damaged_file_is_named_and_the_previous_checkpoint_used(world, directory, seed, file, caplog):
    mutate = MUTATIONS[seed % len(MUTATIONS)]
    newest = directory / "step_000030"
    before = {path.name: path.read_bytes() for path in newest.iterdir()}
    mutate(newest / file, random.Random(seed))
    with caplog.at_level(logging.WARNING):
        checkpoint = CheckpointStore(directory, world, keep=2).open_newest()
    assert checkpoint is not None
    assert checkpoint.step == 20
    assert all(torch.equal(checkpoint.read(name), tensor) for name, tensor in STATE_OF_STEP[20].items())
    [record] = caplog.records
    message = record.getMessage()
    assert message.startswith("MRL-7003 the checkpoint of step 30 is damaged: ")
    bad = directory / "step_000030.bad"
    # a swap damages two files, and either may be found first
    changed = [name for name in before if not (bad / name).is_file() or (bad / name).read_bytes() != before[name]]
    assert any(name in message for name in [*changed, file])
    assert message.endswith("It is kept as step_000030.bad. Step 20 is used instead.")
    assert not newest.exists()


def test_every_bit_of_a_manifest_counts(directory):
    path = directory / "step_000030" / "manifest.json"
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match=r"^MRL-7003 the checkpoint of step 30 is damaged: manifest\.json"):
            open_checkpoint(directory, 30)


def test_several_damaged_checkpoints_are_passed_over(world, directory, caplog):
    (directory / "step_000030" / "manifest.json").unlink()
    emptied = directory / "step_000020" / "rank_00001.safetensors"
    num_bytes = emptied.stat().st_size
    emptied.write_bytes(b"")
    store = CheckpointStore(directory, world, keep=2)
    checkpoint = store.open_newest()
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert [record.getMessage().partition(". It is kept")[0] for record in caplog.records] == [
        "MRL-7003 the checkpoint of step 30 is damaged: manifest.json is missing",
        f"MRL-7003 the checkpoint of step 20 is damaged: rank_00001.safetensors has 0 bytes instead of {num_bytes}",
    ]
    # done again, and damaged again
    store.save(20, [], {}, {}, wait=True)
    (directory / "step_000020" / "manifest.json").write_text("{}")
    checkpoint = store.open_newest()
    assert checkpoint is not None
    assert checkpoint.step == 10
    assert sorted(path.name for path in directory.iterdir()) == [
        "step_000010", "step_000020.bad", "step_000020.bad.1", "step_000030.bad",
    ]  # fmt: skip
    (directory / "step_000010" / "manifest.json").write_text("")
    caplog.clear()
    assert store.open_newest() is None
    assert caplog.records[0].getMessage().endswith("It is kept as step_000010.bad. No older one is left.")


def test_a_reader_without_ranks_verifies_what_it_opens_and_changes_nothing(directory):
    flip_bit(directory / "step_000030" / "rank_00002.safetensors", random.Random(0))
    checkpoint = open_checkpoint(directory, None)
    assert checkpoint.step == 30
    assert checkpoint.rank_state(0) == {"rng": torch.tensor([0])}
    with pytest.raises(
        StorageError, match=r"^MRL-7003 the checkpoint of step 30 is damaged: rank_00002\.safetensors has"
    ):
        checkpoint.rank_state(2)
    with pytest.raises(StorageError, match="MRL-7003"):
        checkpoint.read("actor/w")
    assert len(list(directory.iterdir())) == 3


def test_a_disk_that_does_not_answer_is_no_damage(world, directory, monkeypatch):
    """Giving up a good checkpoint because of a stale mount would be worse than not starting."""
    real_open = os.open

    def refuse(path, *args, **kw):
        if str(path).endswith("rank_00001.safetensors"):
            raise PermissionError(13, "Permission denied", str(path))
        return real_open(path, *args, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            StorageError, match=r"^MRL-7005 the checkpoints in run/checkpoints cannot be used: .*denied"
        ):
            CheckpointStore(directory, world, keep=2).open_newest()
    assert (directory / "step_000030").is_dir()


def test_a_newer_format_is_no_damage(world, directory):
    path = directory / "step_000030"
    manifest = read_manifest(path, 30)
    (path / "manifest.json").write_bytes(replace(manifest, format=2).render())
    with pytest.raises(
        DataError, match=r"^MRL-2801 step_000030 is a checkpoint of format 2; this megarl reads format 1"
    ):
        CheckpointStore(directory, world, keep=2).open_newest()
    assert path.is_dir()


def test_a_manifest_cannot_lead_elsewhere(world, directory):
    """A file that is sealed correctly, but was not made by a save."""
    path = directory / "step_000030"
    manifest = read_manifest(path, 30)
    outside = [replace(record, name=f"../step_000020/{record.name}") for record in manifest.files]
    (path / "manifest.json").write_bytes(replace(manifest, files=outside).render())
    checkpoint = CheckpointStore(directory, world, keep=2).open_newest()
    assert checkpoint is not None
    assert checkpoint.step == 20
