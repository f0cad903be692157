"""The layout nearest to an impossible one: what to write instead when several numbers would have to change together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.model_shape import ModelShape
from megarl.config.parallel import MOST_RANKS, ParallelSettings


@dataclass(frozen=True, slots=True)
class _Cut:
    """A choice of some of the sizes. ``cost`` is how far they are from those that were asked for, in doublings."""

    cost: float
    sizes: tuple[int, ...]


def tensor_parts(shape: ModelShape) -> dict[str, int]:
    """What every tensor-parallel rank gets an equal part of."""
    parts = {"heads": shape.num_heads, "kv heads": shape.num_kv_heads}
    if shape.num_sparse_layers < shape.num_layers:
        parts["mlp columns"] = shape.intermediate_size
    if shape.experts is not None and shape.experts.shared_intermediate_size:
        parts["shared expert columns"] = shape.experts.shared_intermediate_size
    return parts


def divisors(number: int, most: int = MOST_RANKS) -> list[int]:
    """The divisors of ``number`` up to ``most``, in order."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]


def balanced_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Stages that differ by one layer at most; the first ones have more."""
    layers, rest = divmod(num_layers, num_stages)
    return tuple(layers + (stage < rest) for stage in range(num_stages))


def nearest_layout(asked: ParallelSettings, shape: ModelShape, num_ranks: int) -> ParallelSettings:
    """The valid layout on ``num_ranks`` whose sizes differ least from those that were asked for.

    There always is one: nothing cut at all, and every rank a replica.
    """
    found: list[tuple[_Cut, _Cut, _Cut]] = []
    whole = math.gcd(*tensor_parts(shape).values())
    for tp_size in (size for size in divisors(num_ranks) if whole % size == 0):
        for pp_size in divisors(num_ranks // tp_size, shape.num_layers):
            stages = min(_stage_cuts(asked, shape.num_layers, pp_size), key=_rank_cut, default=None)
            experts = min(_expert_cuts(asked, shape, num_ranks // pp_size, tp_size), key=_rank_cut, default=None)
            if stages is None or experts is None:
                continue
            for cp_size in divisors(num_ranks // (tp_size * pp_size)):
                cost = _distance(tp_size, asked.tp_size) + _distance(cp_size, asked.cp_size)
                found.append((_Cut(cost, (tp_size, cp_size)), stages, experts))
    (tp_size, cp_size), (pp_size, vpp_size), (ep_size, etp_size) = (
        cut.sizes for cut in min(found, key=lambda cuts: (sum(cut.cost for cut in cuts), *(cut.sizes for cut in cuts)))
    )
    return ParallelSettings(
        tp_size=tp_size,
        sequence_parallel=tp_size > 1 and (asked.sequence_parallel or shape.experts is not None),
        pp_size=pp_size,
        vpp_size=vpp_size,
        stage_layers=_stage_layers(asked, shape.num_layers, pp_size, vpp_size),
        cp_size=cp_size,
        ep_size=ep_size,
        etp_size=None if shape.experts is None or (etp_size == tp_size and asked.etp_size is None) else etp_size,
    )


def _rank_cut(cut: _Cut) -> tuple[float, tuple[int, ...]]:
    return cut.cost, cut.sizes


def _distance(size: int, asked: int) -> float:
    return abs(math.log2(size / asked))


def _stage_cuts(asked: ParallelSettings, num_layers: int, pp_size: int) -> Iterator[_Cut]:
    for vpp_size in range(1, min(num_layers // pp_size, MOST_RANKS) + 1):
        is_equal = num_layers % (pp_size * vpp_size) == 0
        if (is_equal or asked.stage_layers is not None) and (pp_size > 1 or vpp_size == 1):
            yield _Cut(_distance(pp_size, asked.pp_size) + _distance(vpp_size, asked.vpp_size), (pp_size, vpp_size))


def _stage_layers(asked: ParallelSettings, num_layers: int, pp_size: int, vpp_size: int) -> tuple[int, ...] | None:
    """Those that were asked for if they fit; else equal stages, or nearly equal ones."""
    num_stages = pp_size * vpp_size
    given = asked.stage_layers
    if given is not None and len(given) == num_stages and sum(given) == num_layers:
        return given
    return None if num_layers % num_stages == 0 else balanced_stages(num_layers, num_stages)


def _expert_cuts(asked: ParallelSettings, shape: ModelShape, ranks_per_stage: int, tp_size: int) -> Iterator[_Cut]:
    if shape.experts is None:
        yield _Cut(0.0, (1, tp_size))
        return
    for ep_size in divisors(ranks_per_stage):
        if shape.experts.num_experts % ep_size:
            continue
        for etp_size in divisors(ranks_per_stage // ep_size):
            if shape.experts.intermediate_size % etp_size == 0 and (ep_size > 1 or etp_size == tp_size):
                wanted = tp_size if asked.etp_size is None else asked.etp_size
                cost = _distance(ep_size, asked.ep_size) + _distance(etp_size, wanted)
                yield _Cut(cost, (ep_size, etp_size))
