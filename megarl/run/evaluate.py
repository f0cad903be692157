"""Held-out evaluation: every set of prompts, k answers each, scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.algorithms.rewards import require_rewards
from megarl.core.protocols import Fleet, SamplingParams
from megarl.core.sample import Prompt
from megarl.data.tokenizer import Tokenizer
from megarl.metrics.at_k import at_k
from megarl.metrics.meter import Meter
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups
from megarl.rollout.single_turn import answer_all
from megarl.run.eval_schedule import Schedule
from megarl.run.residency import Residency
from megarl.run.sync import EngineSync


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One named set. ``prompts`` is empty on ranks other than the driver."""

    name: str
    prompts: Sequence[Prompt]
    num_samples: int
    params: SamplingParams
    reward: RewardFunction


class Evaluator:
    """Answers the sets with the current weights. The same seeds each time: a difference is the policy's."""

    def __init__(
        self,
        sets: Sequence[EvalSet],
        schedule: Schedule,
        tokenizer: Tokenizer,
        fleet: Fleet,
        sync: EngineSync,
        residency: Residency,
        seed: int,
    ) -> None:
        self._sets = sets
        self._schedule = schedule
        self._tokenizer = tokenizer
        self._fleet = fleet
        self._sync = sync
        self._residency = residency
        self._seed = seed

    def evaluate_if_due(self, step: int, meter: Meter) -> bool:
        """Evaluate the weights after ``step`` if the schedule says so; tells whether it did. Collective."""
        if not self._sets or not self._schedule.is_due(step):
            return False
        self._sync.refresh(step, meter)
        with meter.timed("timing_s/testing"), self._residency.phase("actor_infer/generate", meter):
            for eval_set in self._sets:
                self._evaluate(eval_set, meter)
        return True

    def _evaluate(self, eval_set: EvalSet, meter: Meter) -> None:
        seed = (self._seed, "evaluation", eval_set.name)
        # The fleet's own statistics would mix with those of the training samples.
        groups = answer_all(
            eval_set.prompts, eval_set.num_samples, eval_set.params, seed, self._fleet, self._tokenizer, Meter()
        )
        if not groups:
            return
        score_groups(groups, eval_set.reward)
        rewards = [require_rewards(group) for group in groups]
        for name, value in at_k(rewards).items():
            meter.mean(f"eval/{eval_set.name}/score/{name}", value, 1)
        for reward in (reward for rewards_of_prompt in rewards for reward in rewards_of_prompt):
            meter.mean("val/score/mean", reward, 1)
            meter.max("val/score/max", reward)
            meter.min("val/score/min", reward)


class NoEvaluation:
    """For runs that never generate."""

    def evaluate_if_due(self, step: int, meter: Meter) -> bool:  # noqa: ARG002
        """Never due."""
        return False
