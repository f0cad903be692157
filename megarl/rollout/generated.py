"""Rollouts that the current policy generates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.core.protocols import Fleet, SamplingParams
from megarl.core.sample import Group
from megarl.data.tokenizer import Tokenizer
from megarl.metrics.meter import Meter
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups
from megarl.rollout.prompt_stream import PromptStream
from megarl.rollout.single_turn import answer_all, report_lengths


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What a step generates."""

    prompts_per_step: int
    group_size: int
    params: SamplingParams
    seed: int


class GeneratedRollouts:
    """Draws prompts, lets the fleet answer, and scores the answers. The driver does the thinking."""

    phase = "actor_infer/generate"

    def __init__(
        self, prompts: PromptStream, tokenizer: Tokenizer, reward: RewardFunction, fleet: Fleet, plan: RolloutPlan
    ) -> None:
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._reward = reward
        self._fleet = fleet
        self._plan = plan

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""
        return self._prompts.epoch

    def collect(self, step: int, meter: Meter) -> Sequence[Group]:
        """The step's scored groups on the driver, [] elsewhere. Collective."""
        prompts = self._prompts.draw(self._plan.prompts_per_step)
        seed = (self._plan.seed, "sampling", step)
        with meter.timed("timing_s/gen"):
            groups = answer_all(
                prompts, self._plan.group_size, self._plan.params, seed, self._fleet, self._tokenizer, meter
            )
        with meter.timed("timing_s/reward"):
            score_groups(groups, self._reward)
        report_lengths(groups, self._plan.params.max_new_tokens, meter)
        _report_scores(groups, meter)
        return groups


def _report_scores(groups: Sequence[Group], meter: Meter) -> None:
    """The named scores that a reward function gave beside its number: each prompt's mean, then over prompts."""
    for group in groups:
        names = {name for sample in group.samples for name in sample.scores}
        for name in names:
            values = [sample.scores[name] for sample in group.samples if name in sample.scores]
            mean = sum(values) / len(values)
            meter.mean(f"rollout/{name}/mean", mean, 1)
            meter.max(f"rollout/{name}/max", mean)
            meter.min(f"rollout/{name}/min", mean)
