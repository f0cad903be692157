"""A real world of one rank inside the test process, and hand-made batches for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from megarl.core.batch import MicroBatch
from megarl.core.world import Axis, World
from megarl.metrics.meter import Meter
from megarl.metrics.reduce import reduce_to_driver


@contextmanager
def one_rank_world() -> Iterator[World]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group(backend="gloo")
        alone = Axis(0, 1, group)
        axes = dict.fromkeys(("tp", "pp", "dp", "cp", "ep", "etp", "edp"), alone)
        yield World(0, 1, 0, torch.device("cpu"), group, **axes, dp_rank_of=(0,))
    finally:
        dist.destroy_process_group()


def reported(meter: Meter, world: World) -> dict[str, float]:
    """The numbers that a run would log. Losses count as those of one optimizer step."""
    for name, statistic in list(meter.statistics.items()):
        if statistic.kind == "loss":
            meter.loss(name, 0.0, num_updates=1)
    numbers = reduce_to_driver(meter, world)
    assert numbers is not None
    return numbers


def micro_of(masks: Sequence[Sequence[float]], **columns: torch.Tensor) -> MicroBatch:
    """Sequences by their loss masks; every loss token counts 1 / (number of loss tokens) unless told otherwise."""
    loss_mask = torch.tensor([flag for mask in masks for flag in mask], dtype=torch.float32)
    lengths = [len(mask) for mask in masks]
    micro = MicroBatch(
        token_ids=torch.arange(len(loss_mask)),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        loss_mask=loss_mask,
        rollout_logprobs=torch.zeros_like(loss_mask),
        newest_mask=loss_mask.clone(),
        sample_index=torch.arange(len(masks)),
        engine_index=torch.zeros(len(masks), dtype=torch.int64),
        scores=torch.zeros(len(masks)),
        rewards=torch.zeros(len(masks)),
        credit=torch.zeros(len(masks)),
        loss_weight=loss_mask / loss_mask.sum().clamp(min=1),
        sample_weight=torch.ones(len(masks)),
        sft_weight=torch.zeros(len(masks)),
    )
    for name, column in columns.items():
        setattr(micro, name, column)
    return micro
