"""Batches reach the ranks of two real processes over gloo."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megarl.core import wire
from megarl.core.batch import TrainBatch
from megarl.core.sample import Group, Prompt, Sample
from megarl.core.world import Axis, World
from megarl.data.distribute import distribute
from megarl.data.pack import PackPlan, pack


def make_groups() -> list[Group]:
    generator = np.random.default_rng(0)
    groups = []
    for number in range(4):
        samples = []
        for length in generator.integers(3, 30, size=3).tolist():
            mask = (np.arange(length) >= 2).astype(np.int8)
            logprobs = -generator.random(length, dtype=np.float32) * mask
            samples.append(Sample(generator.integers(0, 64, length), mask, logprobs, "stop", reward=float(number)))
        groups.append(Group(Prompt(str(number), "", np.zeros(2, np.int64)), samples))
    return groups


def make_batches(dp_size: int) -> list[TrainBatch]:
    return pack(make_groups(), PackPlan(dp_size, num_minibatches=2, max_tokens_per_microbatch=40))


def run_rank(rank: int, directory: str, dp_size: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        group = dist.new_group(backend="gloo")
        alone = Axis(0, 1, group)
        dp_rank_of = (0, 1) if dp_size == 2 else (0, 0)
        world = World(
            rank=rank,
            size=2,
            local_rank=rank,
            device=torch.device("cpu"),
            control_group=group,
            tp=alone if dp_size == 2 else Axis(rank, 2, group),
            pp=alone,
            cp=alone,
            ep=alone,
            etp=alone,
            edp=alone,
            dp=Axis(rank, 2, group) if dp_size == 2 else alone,
            dp_rank_of=dp_rank_of,
        )
        for step in range(2):  # twice: the collective must leave nothing behind
            batch = distribute(make_batches(dp_size) if world.is_driver else None, world)
            Path(directory, f"batch.{rank}.{step}").write_bytes(wire.encode(batch.to_tree()))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dp_size", [1, 2], ids=["tensor-parallel peers", "data-parallel ranks"])
def test_every_rank_gets_the_batch_of_its_coordinate(tmp_path: Path, dp_size: int) -> None:
    mp.spawn(run_rank, args=(str(tmp_path), dp_size), nprocs=2, join=True)  # type: ignore[no-untyped-call]
    frames = [wire.encode(batch.to_tree()) for batch in make_batches(dp_size)]
    for rank in range(2):
        for step in range(2):
            assert (tmp_path / f"batch.{rank}.{step}").read_bytes() == frames[rank % dp_size]
