"""Two real ranks save together, in the background of other collectives, and come back in another layout."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.checkpoint.store import CheckpointStore, newest_step, open_checkpoint
from megarl.core.errors import StorageError
from megarl.core.slices import Box, Slice
from megarl.core.world import World

WEIGHTS = torch.arange(12.0).view(3, 4)
MOMENTS = torch.arange(10, dtype=torch.bfloat16)


def sharing_a_box(world: World, value: float) -> list[Slice]:
    """As the distributed optimizer cuts: all ranks have a flat range of the whole; moments are the driver's alone."""
    start, end = (0, 7) if world.rank == 0 else (7, 12)
    box = Box("actor/w", (3, 4), (0, 0), (3, 4))
    slices = [Slice(box, start, end, WEIGHTS.view(-1)[start:end] + value)]
    if world.is_driver:
        slices.append(Slice(Box("actor/m", (10,), (0,), (10,)), 0, 10, MOMENTS.clone()))
    return slices


def columns_each(world: World) -> list[Slice]:
    """As tensor parallelism cuts, with room only."""
    box = Box("actor/w", (3, 4), (0, 2 * world.rank), (3, 2))
    return [Slice(box, 0, 6, torch.zeros(6)), Slice(Box("actor/m", (10,), (0,), (10,)), 0, 10, MOMENTS * 0)]


def save_in_the_background(world: World, directory: str) -> int:
    """Save after save while the loop's own group is busy; how many messages of the loop arrived unharmed."""
    store = CheckpointStore(Path(directory), world, keep=2)
    num_right = 0
    for step in range(1, 6):
        slices = sharing_a_box(world, float(step))
        store.save(step, slices, {"step": step, "rank": world.rank}, {"rng": torch.tensor([world.rank])}, wait=False)
        for part in slices:
            part.tensor.fill_(-1)
        for number in range(50):
            sent = {"step": step, "number": number, "array": np.full(100, world.rank)}
            gathered = world.gather(sent)
            answer = world.broadcast([part["array"].sum().item() for part in gathered] if gathered else None)
            num_right += answer == [0, 100]
    store.finish()
    return num_right


def load(world: World, directory: str) -> tuple[Any, ...]:
    """(step, same layout, other layout, rank state) of the newest good one, and the driver's warnings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megarl.checkpoint").addHandler(handler)
    checkpoint = CheckpointStore(Path(directory), world, keep=2).open_newest()
    logging.getLogger("megarl.checkpoint").removeHandler(handler)
    assert checkpoint is not None
    same, other = sharing_a_box(world, -100.0), columns_each(world)
    checkpoint.fill(same)
    checkpoint.fill(other)
    state = checkpoint.rank_state(world.rank)
    assert state is not None
    values = [[part.tensor.tolist() for part in slices] for slices in (same, other)]
    return checkpoint.step, *values, state["rng"].item(), checkpoint.progress, checkpoint.layout, warnings


def test_saves_do_not_disturb_the_loop_and_come_back_in_any_layout(gang, tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    assert gang(2).run(save_in_the_background, directory=str(directory)) == [250, 250]
    assert sorted(path.name for path in directory.iterdir()) == ["step_000004", "step_000005"]
    for rank, (step, same, other, rng, progress, layout, warnings) in enumerate(
        gang(2).run(load, directory=str(directory))
    ):
        expected = WEIGHTS + step
        assert (step, progress, rng, warnings) == (5, {"step": 5, "rank": 0}, rank, [])
        assert same[0] == expected.view(-1)[slice(0, 7) if rank == 0 else slice(7, 12)].tolist()
        assert other == [expected[:, 2 * rank : 2 * rank + 2].reshape(-1).tolist(), MOMENTS.tolist()]
        assert (layout["num_ranks"], layout["dp"], layout["tp"]) == (2, 2, 1)
    # and on one rank, that is none of theirs
    checkpoint = open_checkpoint(directory, 4)
    assert torch.equal(checkpoint.read("actor/w"), WEIGHTS + 4)
    assert torch.equal(checkpoint.read("actor/m"), MOMENTS)
    assert checkpoint.names() == ["actor/m", "actor/w"]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_agree_on_the_checkpoint_before_a_damaged_one(gang, tmp_path, rank):
    """Each rank hashes one of the two files, so only one of them sees the damage."""
    directory = tmp_path / "run" / "checkpoints"
    gang(2).run(save_in_the_background, directory=str(directory))
    path = directory / "step_000005" / f"rank_{rank:05d}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    results = gang(2).run(load, directory=str(directory))
    assert [result[0] for result in results] == [4, 4]
    [told], silent = (result[-1] for result in results)
    assert told.startswith(f"MRL-7003 the checkpoint of step 5 is damaged: {path.name} has another SHA-256")
    assert told.endswith("Step 4 is used instead.")
    assert silent == []


def fail_on_one_rank(world: World, directory: str) -> list[str]:
    store = CheckpointStore(Path(directory), world, keep=2)
    store.save(1, sharing_a_box(world, 1.0), {}, {}, wait=True)
    os.environ["MEGARL_FAULT"] = "save/file-written:1:2=enospc"
    messages = []
    try:
        store.save(2, sharing_a_box(world, 2.0), {}, {}, wait=False)
        world.barrier()
        store.save(3, sharing_a_box(world, 3.0), {}, {}, wait=False)
    except StorageError as error:
        messages.append(str(error))
    finally:
        del os.environ["MEGARL_FAULT"]
    newest = newest_step(Path(directory))
    world.barrier()
    store.save(3, sharing_a_box(world, 3.0), {}, {}, wait=True)
    return [*messages, f"newest {newest}, then {newest_step(Path(directory))}"]


def test_a_full_disk_on_one_rank_is_told_by_all(gang, tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    first, second = gang(2).run(fail_on_one_rank, directory=str(directory))
    assert first == second
    assert first[0].startswith(
        "MRL-7004 the checkpoint of step 2 could not be written: rank_00001.safetensors: No space left on device.\n"
    )
    num_bytes = sum(path.stat().st_size for path in (directory / "step_000001").glob("rank_*"))
    assert f"It needs {num_bytes:,} bytes" in first[0]
    assert first[1] == "newest 1, then 3"
    assert sorted(path.name for path in directory.iterdir()) == ["step_000001", "step_000003"]
