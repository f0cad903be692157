"""Rewards that run in worker processes: everything of the user's, and what might take long or crash."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path

from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt, Sample
from megarl.rewards.outcome import Failure
from megarl.rewards.parcel import wrap
from megarl.rewards.pool import WorkerPool, default_num_workers
from megarl.rewards.relay_link import read_relays
from megarl.rewards.reward import Reward
from megarl.rewards.worker_process import WorkerSpec


class WorkerCalls:
    """One function and its own pool: no two functions share a process."""

    def __init__(self, reward: RewardSettings, settings: ScoringSettings, logs: Path | None = None) -> None:
        spec = worker_spec(reward, settings, logs)
        num_cpus = spec.relays.num_cpus if spec.relays else default_num_workers()
        self._pool = WorkerPool(spec, settings.num_workers or num_cpus)

    def submit(self, prompt: Prompt, sample: Sample) -> Future[Reward | Failure]:
        """Score copies of both in a worker."""
        try:
            return self._pool.submit(wrap(prompt, sample))
        except (TypeError, ValueError) as error:
            unsent: Future[Reward | Failure] = Future()
            text = f"the row of prompt {excerpt(prompt.id)} cannot be sent to a worker ({error})"
            unsent.set_result(Failure("could not be asked", text, "MRL-2114"))
            return unsent

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()


def worker_spec(reward: RewardSettings, settings: ScoringSettings, logs: Path | None) -> WorkerSpec:
    """What a worker of this reward is told."""
    return WorkerSpec(
        reward.name,
        reward.options,
        settings.timeout_seconds,
        settings.start_timeout_seconds,
        int(settings.memory_gb * 2**30),
        logs / f"reward_{reward.shown_label}.log" if logs else None,
        read_relays(os.environ),
    )
