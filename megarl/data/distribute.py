"""From the driver's groups to every rank's batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.protocols import Statistics
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.data.pack import FILLER, PackPlan, pack


def deal(groups: Sequence[Group], plan: PackPlan, world: World, meter: Statistics) -> TrainBatch:
    """Pack the driver's groups and give every rank its share. Collective."""
    batches = None
    if world.is_driver:
        batches = pack(groups, plan)
        report_balance(groups, batches, meter)
    return distribute(batches, world)


def distribute(batches: Sequence[TrainBatch] | None, world: World) -> TrainBatch:
    """This rank's batch on its device. Collective: the driver passes one batch per data-parallel rank, others None.

    Ranks with the same data-parallel coordinate (tensor and pipeline peers) get the same batch.
    """
    if batches is None:
        return TrainBatch.from_tree(world.scatter(None), world.device)
    trees = [batch.to_tree() for batch in batches]
    return TrainBatch.from_tree(world.scatter([trees[dp_rank] for dp_rank in world.dp_rank_of]), world.device)


def report_balance(groups: Sequence[Group], batches: Sequence[TrainBatch], meter: Statistics) -> None:
    """Tokens per data-parallel rank: as they would be in the order of arrival, and as they are."""
    lengths = [len(sample.token_ids) for group in groups for sample in group.samples]
    if not lengths:
        return
    arrived = [int(part.sum()) for part in np.array_split(np.array(lengths), len(batches))]
    balanced = [sum(_num_real_tokens(micro) for micro in batch.microbatches()) for batch in batches]
    for name, value in {
        "min": min(arrived),
        "max": max(arrived),
        "minmax_diff": max(arrived) - min(arrived),
        "mean": sum(arrived) / len(arrived),
        "balanced_min": min(balanced),
        "balanced_max": max(balanced),
    }.items():
        meter.last(f"global_seqlen/{name}", value)


def _num_real_tokens(micro: MicroBatch) -> int:
    lengths = micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]
    return int(lengths[micro.sample_index != FILLER].sum())
