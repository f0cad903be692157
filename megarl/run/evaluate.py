"""Held-out evaluation: every set of prompts, k answers each, scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.core.protocols import Fleet, SamplingParams
from megarl.core.sample import Prompt
from megarl.data.tokenizer import Tokenizer
from megarl.metrics.at_k import at_k
from megarl.metrics.meter import Meter
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups
from megarl.rollout.single_turn import answer_all
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


@dataclass(frozen=True, slots=True)
class Schedule:
    """When to evaluate. Step 0 is before training; the last step of a stage always shows what the stage achieved."""

    every: int
    before_training: bool
    at_end: bool
    stage_ends: tuple[int, ...]

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after ``step``."""
        if step == 0:
            return self.before_training
        if step == self.stage_ends[-1]:
            return self.at_end
        main_stage_step = step - (self.stage_ends[-2] if len(self.stage_ends) > 1 else 0)
        on_schedule = self.every > 0 and main_stage_step > 0 and main_stage_step % self.every == 0
        return on_schedule or (step in self.stage_ends and self.before_training)


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
        rewards = [[sample.reward or 0.0 for sample in group.samples] for group in groups]
        for name, value in at_k(rewards).items():
            meter.mean(f"eval/{eval_set.name}/score/{name}", value, 1)
        for reward in (reward for rewards_of_prompt in rewards for reward in rewards_of_prompt):
            meter.mean("val/score/mean", reward, 1)
            meter.max("val/score/max", reward)
            meter.min("val/score/min", reward)
