"""Batches between two layouts of the same real ranks, and columns back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core import wire
from megarl.core.batch import TrainBatch
from megarl.data.pack import PackPlan, pack
from tests.distributed.test_distribute import make_groups

PLAN = PackPlan(1, num_minibatches=2, max_tokens_per_microbatch=40)
# (source, target): sizes of the layouts, and how the target's plan differs beside its dp_size
CASES = {
    "tp2 to dp2": (2, {"tp_size": 2}, {}, {"max_tokens_per_microbatch": 60}),
    "dp2 to pp2": (2, {}, {"pp_size": 2}, {"count_multiple": 2}),
    "dp4 to tp2 dp2": (4, {}, {"tp_size": 2}, {"same_count": True}),
    "tp2 dp2 to pp2 dp2": (4, {"tp_size": 2}, {"pp_size": 2}, {}),
    "pp4 to dp4": (4, {"pp_size": 4}, {}, {"max_tokens_per_microbatch": 200}),
}


class Listener:
    """A model that says of each token something that only its sample and position decide, and remembers its batches."""

    forward_phase, annotation_timer = "critic/compute_values", "timing_s/values"
    train_phase, update_timer = "critic/train_step", "timing_s/update_critic"
    columns = ("values", "ref_logprobs")

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        self.seen.append(wire.encode(batch.to_tree()))
        for micro in batch.microbatches():
            index = micro.sample_index[micro.sequence_of_token]
            micro.values = torch.where(index < 0, 0.0, index * 100.0 + micro.positions)
            micro.ref_logprobs = -micro.values / 3
        return batch

    def update(self, batch: TrainBatch, algorithm: Any) -> Any:
        from megarl.metrics.meter import Meter

        assert algorithm == "an algorithm"
        self.seen.append(wire.encode(batch.to_tree()))
        meter = Meter()
        meter.sum("critic/skipped_updates", 1.0)
        return meter


def relayout_job(world: Any, other: dict[str, int], changes: dict[str, Any]) -> dict[str, Any]:
    """What the model saw when it annotated and learned, and the batch of the source layout afterwards."""
    from megarl.config.parallel import ParallelSettings
    from megarl.data.distribute import distribute
    from megarl.data.relayout import LearnerElsewhere, Relayout
    from megarl.models.setup import lay_out

    target = lay_out(world, ParallelSettings(**other)).world
    source_plan = replace(PLAN, dp_size=world.dp.size)
    target_plan = replace(PLAN, dp_size=target.dp.size, **changes)
    batch = distribute(pack(make_groups(), source_plan) if world.is_driver else None, world)
    listener = Listener()
    relayout = Relayout(world, source_plan, target, target_plan)
    model = LearnerElsewhere(listener, relayout)
    assert model.annotate(batch) is batch
    for micro in batch.microbatches():
        assert micro.values is not None
        micro.returns = micro.values + 1
    meter = model.update(batch, "an algorithm")  # type: ignore[arg-type]
    return {
        "seen": listener.seen,
        "after": wire.encode(batch.to_tree()),
        "dp_ranks": (world.dp.rank, target.dp.rank),
        "dp_sizes": (world.dp.size, target.dp.size),
        "identity": relayout.identity,
        "statistics": list(meter.statistics),
    }


def expected(plan: PackPlan, upto: str) -> list[bytes]:
    """The ranks' batches, packed anew under ``plan`` and annotated by the model or, as well, given returns."""
    batches = pack(make_groups(), plan)
    for batch in batches:
        if upto != "packed":
            Listener().annotate(batch)
        if upto == "returns":
            for micro in batch.microbatches():
                real = micro.sample_index[micro.sequence_of_token] >= 0
                assert micro.values is not None
                micro.returns = torch.where(real, micro.values + 1, 0.0)
    return [wire.encode(batch.to_tree()) for batch in batches]


@pytest.mark.parametrize("case", CASES)
def test_a_model_sees_its_own_cut_and_its_columns_come_back(case: str, gang: Any) -> None:
    size, source, target, changes = CASES[case]
    results = gang(size).run(relayout_job, parallel=source, other=target, changes=changes)
    source_size, target_size = results[0]["dp_sizes"]
    source_plan = replace(PLAN, dp_size=source_size)
    target_plan = replace(PLAN, dp_size=target_size, **changes)
    for result in results:
        assert not result["identity"]
        own, there = result["dp_ranks"]
        assert result["seen"] == [expected(target_plan, "packed")[there], expected(target_plan, "returns")[there]]
        after = TrainBatch.from_tree(wire.decode(result["after"]), torch.device("cpu"))
        told = TrainBatch.from_tree(wire.decode(expected(source_plan, "annotated")[own]), torch.device("cpu"))
        for ours, theirs in zip(after.microbatches(), told.microbatches(), strict=True):
            assert ours.values is not None and theirs.values is not None
            assert np.array_equal(ours.values, theirs.values)
            assert np.array_equal(ours.ref_logprobs, theirs.ref_logprobs)  # type: ignore[arg-type]
        assert result["statistics"] == ["critic/skipped_updates"]


def test_the_same_cut_travels_nowhere(gang: Any) -> None:
    """Pipeline stages in the place of tensor-parallel ranks: every rank's samples stay the same."""
    for result in gang(2).run(relayout_job, parallel={"tp_size": 2}, other={"pp_size": 2}, changes={}):
        assert result["identity"]
        assert len(result["seen"]) == 2


def mismatch_job(world: Any) -> str:
    from megarl.data.relayout import Relayout

    with pytest.raises(ValueError, match="3 data-parallel ranks, the world has 1"):
        Relayout(world, PLAN, world, replace(PLAN, dp_size=3))
    return "refused"


def test_a_plan_for_other_ranks_is_refused(gang: Any) -> None:
    assert gang(1).run(mismatch_job) == ["refused"]
