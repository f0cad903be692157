"""Held-out evaluation: every set of prompts, k answers each, scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.config.evaluation import EvalSetSettings
from megarl.config.rollout import RolloutSettings
from megarl.core.protocols import SamplingParams
from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.at_k import standard_error
from megarl.metrics.meter import Meter
from megarl.rewards.scorer import Scorer
from megarl.rollout.answering import Answering, OnSample, Questions, take_no_notice
from megarl.rollout.serving import SCORE, Enter
from megarl.run.eval_schedule import Schedule

# scores[prompt][attempt] -> statistics by name, mean@k and so on
Summarise = Callable[[Sequence[Sequence[float]]], dict[str, float]]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One named set. ``prompts`` is empty on ranks other than the driver. A bench set is evaluated once, at the end."""

    name: str
    kind: Literal["eval", "bench"]
    prompts: Sequence[Prompt]
    num_samples: int
    params: SamplingParams
    scorer: Scorer


class Evaluator:
    """Answers the sets with the current weights. The same seeds each time: a difference is the policy's."""

    def __init__(
        self,
        sets: Sequence[EvalSet],
        schedule: Schedule,
        answering: Answering,
        enter: Enter,
        seed: int,
        summarise: Summarise,
    ) -> None:
        self.sets = sets
        self._schedule = schedule
        self._answering = answering
        self._enter = enter
        self._seed = seed
        self._summarise = summarise

    def evaluate_if_due(self, step: int, meter: Meter) -> bool:
        """Evaluate the weights after ``step`` if the schedule says so; tells whether it did. Collective."""
        due = {"eval": self._schedule.is_due(step), "bench": self._schedule.is_end(step)}
        for kind in (kind for kind, is_due in due.items() if is_due):
            self.evaluate([one for one in self.sets if one.kind == kind], step, meter)
        return any(due[one.kind] for one in self.sets)

    def evaluate(self, sets: Sequence[EvalSet], step: int, meter: Meter, watch: OnSample = take_no_notice) -> None:
        """Evaluate the weights after ``step`` on these sets, all of which are asked for at once. Collective.

        ``watch`` sees every sample when it is drawn. Sets of one kind are always asked for together: an answer's last
        bits may depend on what else is in the engine.
        """
        if not sets:
            return
        questions = [
            Questions(
                f"{one.kind}/{one.name}",
                one.prompts,
                one.num_samples,
                one.params,
                (self._seed, "evaluation", one.name),
                _both(one.scorer.submit, watch),
            )
            for one in sets
        ]
        # The engines' own statistics would mix with those of the training samples.
        answered = self._answering.answer(questions, step, "timing_s/testing", meter, Meter())
        with meter.timed("timing_s/testing"), self._enter(SCORE, meter):
            for one, groups in zip(sets, answered, strict=True):
                one.scorer.finish_all(groups)
        for eval_set, groups in zip(sets, answered, strict=True):
            self._report(eval_set, groups, meter)

    def _report(self, eval_set: EvalSet, groups: Sequence[Group], meter: Meter) -> None:
        if not groups:
            return
        prefix = f"{eval_set.kind}/{eval_set.name}"
        columns = {"score": [_rewards(group) for group in groups]} | _named_scores(groups)
        for score, tasks in columns.items():
            for name, value in self._summarise(tasks).items():
                meter.mean(f"{prefix}/{score}/{name}", value, 1)
        meter.mean(f"{prefix}/score/stderr@{eval_set.num_samples}", standard_error(columns["score"]), 1)
        samples = [sample for group in groups for sample in group.samples]
        meter.sum(f"{prefix}/failed_runs", sum(sample.finish == "abort" or bool(sample.failure) for sample in samples))
        if eval_set.kind == "eval":
            for reward in (reward for rewards in columns["score"] for reward in rewards):
                meter.mean("val/score/mean", reward, 1)
                meter.max("val/score/max", reward)
                meter.min("val/score/min", reward)


def sampling_of(settings: EvalSetSettings, rollout: RolloutSettings, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How a set is sampled: in its own way, and for the rest like training samples."""
    return SamplingParams(
        settings.max_new_tokens or rollout.max_new_tokens,
        settings.temperature,
        rollout.top_p if settings.top_p is None else settings.top_p,
        rollout.top_k if settings.top_k is None else settings.top_k,
        stop_token_ids,
    )


class NoEvaluation:
    """For runs that never generate."""

    def evaluate_if_due(self, step: int, meter: Meter) -> bool:  # noqa: ARG002
        """Never due."""
        return False


def _both(submit: OnSample, watch: OnSample) -> OnSample:
    def on_sample(prompt: Prompt, sample: Sample) -> None:
        submit(prompt, sample)
        watch(prompt, sample)

    return on_sample


def _rewards(group: Group) -> list[float]:
    """An attempt whose reward failed counts as 0, and among the failed runs: it cannot vanish from a mean."""
    for sample in group.samples:
        assert sample.failure or sample.reward is not None, f"group {group.prompt.id} has samples without a reward"
    return [0.0 if sample.reward is None else sample.reward for sample in group.samples]


def _named_scores(groups: Sequence[Group]) -> dict[str, list[list[float]]]:
    """``scores[prompt][attempt]`` by name. An attempt without the score counts as 0: it cannot vanish from a mean."""
    names = sorted({name for group in groups for sample in group.samples for name in sample.scores} - {"score"})
    return {name: [[sample.scores.get(name, 0.0) for sample in group.samples] for group in groups] for name in names}
