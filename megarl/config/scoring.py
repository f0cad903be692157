"""How rewards run: worker processes, limits, and what becomes of samples without a reward."""

from __future__ import annotations

from typing import Literal

from megarl.config.section import Section, setting


class ScoringSettings(Section):
    """How rewards run, and what becomes of samples whose reward fails."""

    num_workers: int | None = setting(
        None,
        "Worker processes of each reward that runs in workers; null: one per core, at most 16, or one for each "
        "core of launch.reward_nodes.",
        ge=1,
        le=1024,
        elsewhere="reward_num_workers num_reward_workers",
    )
    timeout_seconds: float = setting(
        10.0,
        "Longest time for one sample; then its worker is killed and the sample has failed.",
        ge=0.05,
        le=86_400,
        elsewhere="reward_timeout timeout",
    )
    start_timeout_seconds: float = setting(
        120.0, "Longest time for a worker to start and import the function.", ge=1, le=86_400
    )
    memory_gb: float = setting(8.0, "Memory (address space) of each process of a worker.", ge=0.5, le=65_536)
    on_failure: Literal["drop_group", "stop"] = setting(
        "drop_group",
        "When a sample has no reward: drop_group leaves its whole group out of the step; stop ends the run.",
    )
    max_failed_fraction: float = setting(
        0.25, "With more failed samples than this in a step or an evaluation, the run ends (exit code 65).", ge=0, le=1
    )
