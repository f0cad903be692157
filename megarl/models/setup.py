"""Start torch.distributed and Megatron-Core's process groups; learn who this rank is."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megarl.core.device import choose_device, collective_backend
from megarl.core.world import Axis, World

# All ranks are started together: one that is not there after this is not coming.
_JOIN_TIMEOUT = timedelta(minutes=5)
# Ranks may wait for hours while the driver generates; a dead peer is noticed by its closed socket, not by this.
_CONTROL_TIMEOUT = timedelta(hours=24)
_COLLECTIVE_TIMEOUT_MINUTES = 60


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a run meet."""

    rank: int
    size: int
    local_rank: int
    init_method: str


def start_world(rendezvous: Rendezvous, device: str, tp_size: int, pp_size: int) -> World:
    """Collective. Builds every process group of the run; one world at a time per process."""
    chosen = choose_device(device, rendezvous.local_rank)
    dist.init_process_group(
        backend=collective_backend(chosen),
        init_method=rendezvous.init_method,
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=_JOIN_TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=_COLLECTIVE_TIMEOUT_MINUTES,
    )
    # No layer of ours draws random numbers; Megatron's tracker must exist all the same.
    model_parallel_cuda_manual_seed(0)
    control_group = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    dp = Axis(
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_data_parallel_world_size(),
        parallel_state.get_data_parallel_group(),
    )
    coordinates = [torch.zeros(1, dtype=torch.int64) for _ in range(rendezvous.size)]
    dist.all_gather(coordinates, torch.tensor([dp.rank]), group=control_group)
    return World(
        rank=rendezvous.rank,
        size=rendezvous.size,
        local_rank=rendezvous.local_rank,
        device=chosen,
        control_group=control_group,
        tp=Axis(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_group(),
        ),
        pp=Axis(
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_group(),
        ),
        dp=dp,
        dp_rank_of=tuple(int(rank) for rank in coordinates),
    )


def stop_world() -> None:
    """Leave the process groups; the last call of a rank that ends well."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
