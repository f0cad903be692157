"""Saves that are killed: ``python -m tests.unit.checkpoint_crashes``, with one crash as a line of JSON on stdin each.

One process imports torch and is forked for every rank of every crash, because the import takes longer than the rest. It
answers with the exit codes of the ranks.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.checkpoint.store import CheckpointStore
from megarl.core.faults import VARIABLE
from megarl.core.slices import Box, Slice
from megarl.core.world import Axis, World


def state(rank: int, size: int, value: float) -> list[Slice]:
    """Each rank holds a part of one box, whose elements all are ``value``."""
    box = Box("w", (3, 4), (0, 0), (3, 4))
    start, end = rank * 12 // size, (rank + 1) * 12 // size
    return [Slice(box, start, end, torch.full((end - start,), value))]


def data_parallel_world(rank: int, size: int) -> World:
    group = dist.new_group(backend="gloo")
    axes = {field.name: Axis(0, 1, group) for field in fields(World) if field.type == "Axis"}
    axes["dp"] = Axis(rank, size, group)
    others = {
        "local_rank": rank,
        "device": torch.device("cpu"),
        "control_group": group,
        "dp_rank_of": tuple(range(size)),
    }
    return World(rank=rank, size=size, **others, **axes)  # type: ignore[arg-type]


def run_rank(directory: str, rank: int, size: int, saves: list[tuple[int, float]], fault: str) -> None:
    """All saves but the last one succeed; the last one meets the fault."""
    rendezvous = dist.FileStore(f"{directory}.rendezvous", size)
    dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=size, timeout=timedelta(minutes=1))
    store = CheckpointStore(Path(directory), data_parallel_world(rank, size), keep=1)
    for number, (step, value) in enumerate(saves):
        if number == len(saves) - 1:
            os.environ[VARIABLE] = fault
        store.save(step, state(rank, size, value), {"value": value}, {}, wait=True)
    dist.destroy_process_group()


def fork(*arguments: Any) -> int:
    child = os.fork()
    if child:
        return child
    try:
        run_rank(*arguments)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for line in sys.stdin:
        crash = json.loads(line)
        size = crash["num_ranks"]
        children = [fork(crash["directory"], rank, size, crash["saves"], crash["fault"]) for rank in range(size)]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        sys.stdout.write(json.dumps(statuses) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
