"""Start torch.distributed, lay models out over the ranks, and learn who this rank is in each layout."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megarl.config.parallel import ParallelSettings
from megarl.core import whereabouts
from megarl.core.device import choose_device, collective_backend
from megarl.core.world import Axis, World
from megarl.models.layout import Layout, megatron_globals
from megarl.models.rendezvous import Meeting, Rendezvous

# Ranks may wait for hours while the driver generates; a dead peer is noticed by its closed socket, not by this.
_CONTROL_TIMEOUT = timedelta(hours=24)
_COLLECTIVE_TIMEOUT_MINUTES = 60


class _Layouts:
    """The layouts of this process. Equal settings share their process groups."""

    def __init__(self) -> None:
        self.none: dict[str, Any] = megatron_globals()
        self.known: dict[ParallelSettings, Layout] = {}


_layouts = _Layouts()


def start_world(rendezvous: Rendezvous, device: str, parallel: ParallelSettings) -> World:
    """Meet all ranks, with nothing to tell them before, and lay the policy out over them. Collective."""
    meeting = Meeting(rendezvous)
    meeting.call_the_roll()
    return connect_world(meeting, device, parallel)


def connect_world(meeting: Meeting, device: str, parallel: ParallelSettings) -> World:
    """Connect the ranks that met and lay the policy out over them. Collective; one world at a time per process."""
    rendezvous = meeting.rendezvous
    index = rendezvous.device_index
    chosen = choose_device(device, rendezvous.local_rank if index is None else index)
    meeting.connect(collective_backend(chosen))
    whereabouts.enter("layout")
    control_group = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    whole = Axis(0, 1, control_group)
    nobody = World(
        rendezvous.rank, rendezvous.size, rendezvous.local_rank, chosen, control_group,
        tp=whole, pp=whole, dp=whole, cp=whole, ep=whole, etp=whole, edp=whole, dp_rank_of=(),
    )  # fmt: skip
    return lay_out(nobody, parallel).world


def lay_out(world: World, parallel: ParallelSettings) -> Layout:
    """The layout with these sizes; its process groups are made at the first call. Collective."""
    if parallel not in _layouts.known:
        _layouts.known[parallel] = _new_layout(world, parallel)
    return _layouts.known[parallel]


def stop_world() -> None:
    """Leave the process groups; the last call of a rank that ends well."""
    vars(parallel_state).update(_layouts.none)
    _layouts.known.clear()
    dist.destroy_process_group()


def _new_layout(world: World, parallel: ParallelSettings) -> Layout:
    before = megatron_globals()
    vars(parallel_state).update(_layouts.none)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        virtual_pipeline_model_parallel_size=parallel.vpp_size if parallel.vpp_size > 1 else None,
        context_parallel_size=parallel.cp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=parallel.expert_tp_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_COLLECTIVE_TIMEOUT_MINUTES,
    )
    # No layer of ours draws random numbers; Megatron's tracker must exist all the same.
    model_parallel_cuda_manual_seed(0)
    dp = _axis(parallel_state.get_data_parallel_group())
    coordinates = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(coordinates, torch.tensor([dp.rank]), group=world.control_group)
    own = replace(
        world,
        tp=_axis(parallel_state.get_tensor_model_parallel_group()),
        pp=_axis(parallel_state.get_pipeline_model_parallel_group()),
        dp=dp,
        cp=_axis(parallel_state.get_context_parallel_group()),
        ep=_axis(parallel_state.get_expert_model_parallel_group()),
        etp=_axis(parallel_state.get_expert_tensor_parallel_group()),
        edp=_axis(parallel_state.get_expert_data_parallel_group()),
        dp_rank_of=tuple(int(rank) for rank in coordinates),
    )
    groups = megatron_globals()
    # While nothing works, Megatron sees the first layout: the policy's.
    vars(parallel_state).update(before if _layouts.known else groups)
    return Layout(parallel, own, groups)


def _axis(group: Any) -> Axis:
    return Axis(dist.get_rank(group), dist.get_world_size(group), group)
