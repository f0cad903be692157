"""How ranks are started and watched."""

from __future__ import annotations

from megarl.config.section import Section, setting


class LaunchSettings(Section):
    """How ranks are started and watched."""

    hang_timeout_seconds: float | None = setting(
        1800.0,
        "If no rank gets on for this long (ten times as long while models are built), or one is stopped for this long, "
        "all of them are ended; null: wait for ever, as with a debugger.",
        ge=1.0,
        le=1e9,
        elsewhere="nccl_timeout distributed_timeout_minutes timeout_minutes watchdog_timeout",
    )
    join_timeout_seconds: float = setting(
        300.0,
        "How long ranks wait for each other at the start.",
        ge=1.0,
        le=1e6,
        elsewhere="rdzv_timeout init_timeout",
    )
    max_restarts: int = setting(
        3,
        "How often `megarl launch ray` starts all ranks again, from the last checkpoint, when a rank or its machine "
        "was lost. Mistakes in the configuration or the data are never tried again.",
        ge=0,
        le=1000,
        elsewhere="max_restart_times max_failures",
    )
    reward_nodes: int = setting(
        0,
        "How many nodes without ranks `megarl launch ray` takes for the worker processes of rewards; 0: they run on "
        "rank 0's node.",
        ge=0,
        le=1000,
        elsewhere="reward_num_nodes num_reward_nodes",
    )
    reward_cpus: int = setting(
        1, "How many cores to reserve on each of launch.reward_nodes; one worker for each.", ge=1, le=1000
    )
    allow_open_cluster: bool = setting(
        False,
        "Let `megarl launch ray` use a Ray cluster that other machines reach and that asks for no token: whoever "
        "reaches it can run programs on it.",
    )
