"""Every rank's meter, as one set of numbers on the driver."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from megarl.core.world import DRIVER, World
from megarl.metrics.meter import Meter
from megarl.metrics.schema import Schema

# What the ranks of a control group last agreed on. Agreement is a collective, so all its ranks hold the same schema.
_AGREED: WeakKeyDictionary[dist.ProcessGroup, Schema] = WeakKeyDictionary()


def reduce_to_driver(meter: Meter, world: World) -> dict[str, float] | None:
    """The step's metrics on the driver, None elsewhere. A collective: every rank calls it once per step.

    Ranks may have different metrics (the first pipeline stage has no losses). The result does not depend on how the
    batch was split over ranks and microbatches, up to float64 rounding. A metric without any weight is left out; NaN
    stays NaN.

    Usually two messages: one flag that nobody met a new metric, and one vector per rank.
    """
    schema = _agree(meter, world)
    vector = torch.from_numpy(schema.pack(meter.statistics))
    # one block of memory for all ranks: nothing has to be put together afterwards
    rows = torch.empty(world.size, len(vector), dtype=vector.dtype) if world.is_driver else None
    dist.gather(vector, None if rows is None else list(rows.unbind()), dst=DRIVER, group=world.control_group)
    return None if rows is None else schema.merge(rows.numpy(), world.places)


def _agree(meter: Meter, world: World) -> Schema:
    """A schema that covers every rank's meter; names and kinds travel only when some rank has a metric that is new."""
    schema = _AGREED.get(world.control_group, Schema({}))
    num_strangers = torch.tensor([0 if schema.covers(meter.statistics) else 1])
    dist.all_reduce(num_strangers, group=world.control_group)
    if int(num_strangers) == 0:
        return schema
    gathered = world.gather([[name, statistic.kind] for name, statistic in meter.statistics.items()])
    verdict: dict[str, object] = {}
    if gathered is not None:
        try:
            verdict["kinds"] = schema.extended((name, kind) for rank in gathered for name, kind in rank).kinds
        except TypeError as error:
            verdict["conflict"] = str(error)
    verdict = world.broadcast(verdict)
    if "conflict" in verdict:  # raised on every rank, so that none is left waiting
        raise TypeError(verdict["conflict"])
    schema = Schema(verdict["kinds"])  # type: ignore[arg-type]  # a dict of str, by the lines above
    _AGREED[world.control_group] = schema
    return schema
