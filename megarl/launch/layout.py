"""What a run asks of its nodes, whoever launches it."""

from __future__ import annotations

from megarl.config.schema import RunConfig


def num_spare_gpus(config: RunConfig, num_nodes: int) -> int:
    """GPUs of every node, beside one for each rank, that separate generation servers take."""
    own = config.generation
    starts_servers = config.uses_servers and not own.urls and not own.colocated
    return -(-(own.num_servers or num_nodes) // num_nodes) * own.tp_size if starts_servers else 0


def warn_of_reward_nodes(config: RunConfig) -> list[str]:
    """For every launcher but Ray's, which is the only one that takes nodes for rewards."""
    if not config.launch.reward_nodes:
        return []
    return [
        f"warning: launch.reward_nodes={config.launch.reward_nodes} is for `megarl launch ray` only; here rewards are "
        "computed on rank 0's node."
    ]
