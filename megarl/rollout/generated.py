"""Rollouts that the current policy generates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megarl.core.protocols import Fleet, SamplingParams
from megarl.core.sample import Group
from megarl.data.tokenizer import Tokenizer
from megarl.metrics.meter import Meter
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups
from megarl.rollout.prompt_stream import PromptStream
from megarl.rollout.single_turn import answer_all
from megarl.rollout.statistics import report_rollouts

GENERATE = "actor_infer/generate"
SCORE = "reward/compute_rewards"

# enters a phase: the block runs with what the phase needs on the device, and is measured
Enter = Callable[[str, Meter], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What a step generates."""

    prompts_per_step: int
    group_size: int
    params: SamplingParams
    max_prompt_tokens: int
    seed: int


class GeneratedRollouts:
    """Draws prompts, lets the fleet answer, and scores the answers. The driver does the thinking."""

    def __init__(
        self,
        prompts: PromptStream,
        tokenizer: Tokenizer,
        reward: RewardFunction,
        fleet: Fleet,
        plan: RolloutPlan,
        enter: Enter,
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._reward = reward
        self._fleet = fleet
        self._plan = plan
        self._enter = enter

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""
        return self._prompts.epoch

    def collect(self, step: int, meter: Meter) -> Sequence[Group]:
        """The step's scored groups on the driver, [] elsewhere. Collective."""
        prompts = self._prompts.draw(self._plan.prompts_per_step)
        seed = (self._plan.seed, "sampling", step)
        with meter.timed("timing_s/gen"), self._enter(GENERATE, meter):
            groups = answer_all(
                prompts, self._plan.group_size, self._plan.params, seed, self._fleet, self._tokenizer, meter
            )
        with meter.timed("timing_s/reward"), self._enter(SCORE, meter):
            score_groups(groups, self._reward)
        report_rollouts(groups, self._plan.params.max_new_tokens, self._plan.max_prompt_tokens, step, meter)
        return groups
