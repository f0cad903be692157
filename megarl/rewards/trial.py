"""A trial of a reward function before anything is started: import it in a worker, check it, and call it once."""

from __future__ import annotations

import time

import numpy as np

from megarl.config.names import REWARD_MODEL
from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.errors import ConfigError, DataError
from megarl.core.excerpt import excerpt
from megarl.core.loop_thread import LoopThread
from megarl.core.sample import Prompt, Sample
from megarl.rewards.load import load_reward, place_of
from megarl.rewards.outcome import Failure
from megarl.rewards.parcel import wrap
from megarl.rewards.reward import Reward
from megarl.rewards.worker_calls import worker_spec
from megarl.rewards.worker_process import WorkerLost, WorkerProcess


def try_reward(reward: RewardSettings, settings: ScoringSettings, prompt: Prompt | None) -> str:
    """One line about what the function gave for the prompt's own answer; raises a `MegarlError` if it does not work.

    Rewards that run in the driver are our own and may cost money: of these only the options are checked. Without a
    prompt, nothing is called.
    """
    if reward.name == REWARD_MODEL:
        return f'reward "{reward.name}": the ranks compute it'
    if place_of(reward.name) == "driver":
        load_reward(reward.name, reward.options)
        return f'reward "{reward.name}": built in'
    began = time.perf_counter()
    loop = LoopThread("reward trial")
    try:
        outcome = loop.run(_try(reward, settings, prompt))
    finally:
        loop.close()
    if isinstance(outcome, Failure):
        if outcome.code.startswith("MRL-1"):
            raise ConfigError(outcome.code, outcome.text)
        expected = "".join(f"\n    {line}" for line in outcome.text.split("\n")[1:])
        raise DataError(outcome.code, f"{outcome.of(reward.name)}{expected}\n    It was tried before the start.")
    seconds = time.perf_counter() - began
    if outcome is None or prompt is None:
        return f'reward "{reward.name}": imported in {seconds:.1f} s'
    return f'reward "{reward.name}": {outcome.value:g} for {_shown(prompt)} (tried in {seconds:.1f} s)'


async def _try(reward: RewardSettings, settings: ScoringSettings, prompt: Prompt | None) -> Reward | Failure | None:
    worker = WorkerProcess(worker_spec(reward, settings, None))
    try:
        await worker.ready()
        return None if prompt is None else await worker.call(wrap(prompt, _sample(prompt)))
    except WorkerLost as lost:
        return lost.failure
    finally:
        await worker.end()


def _sample(prompt: Prompt) -> Sample:
    length = len(prompt.token_ids)
    nothing = np.zeros(length, np.int8), np.zeros(length, np.float32)
    return Sample(prompt.token_ids, *nothing, "stop", prompt.answer or "")


def _shown(prompt: Prompt) -> str:
    answer = "its own answer" if prompt.answer else "an empty response"
    return f"{answer} to prompt {excerpt(prompt.id)}"
