"""The driver's batches reach the ranks that train on them."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.batch import TrainBatch
from megarl.core.world import World


def distribute(batches: Sequence[TrainBatch] | None, world: World) -> TrainBatch:
    """This rank's batch on its device. Collective: the driver passes one batch per data-parallel rank, others None.

    Ranks with the same data-parallel coordinate (tensor and pipeline peers) get the same batch.
    """
    if batches is None:
        return TrainBatch.from_tree(world.scatter(None), world.device)
    trees = [batch.to_tree() for batch in batches]
    return TrainBatch.from_tree(world.scatter([trees[dp_rank] for dp_rank in world.dp_rank_of]), world.device)
