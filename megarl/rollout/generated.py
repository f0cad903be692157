"""Rollouts that the current policy generates, one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.core.protocols import SamplingParams
from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.meter import Meter
from megarl.rewards.scorer import Scorer
from megarl.rollout.answering import Answering, Questions
from megarl.rollout.prompt_stream import PromptStream
from megarl.rollout.serving import SCORE, Enter
from megarl.rollout.statistics import report_rollouts

# writes a step's scored groups down, with the epoch that they belong to
Record = Callable[[int, Sequence[Group], int], None]


def keep_no_record(step: int, groups: Sequence[Group], epoch: int) -> None:
    """For runs that record nothing."""


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What a step generates."""

    prompts_per_step: int
    group_size: int
    params: SamplingParams
    max_prompt_tokens: int
    seed: int
    # whether weights change from step to step; in a run that only generates they stay version 0
    learns: bool = True

    def version_before(self, step: int) -> int:
        """The version of the trainer's weights when ``step`` begins."""
        return step - 1 if self.learns else 0


class Marking:
    """What every rollout goes through once it is drawn: it is scored, reported and, if asked, recorded."""

    def __init__(self, scorer: Scorer, plan: RolloutPlan, enter: Enter, record: Record) -> None:
        self._scorer = scorer
        self._plan = plan
        self._enter = enter
        self._record = record

    def begin(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score a sample that is drawn, in the background. Of the driver."""
        self._scorer.submit(prompt, sample)

    def mark(self, step: int, groups: Sequence[Group], epoch: int, meter: Meter) -> list[Group]:
        """Score the groups; gives those that ``step`` trains on."""
        with meter.timed("timing_s/reward"), self._enter(SCORE, meter):
            groups = self._scorer.finish(groups, meter)
        plan, next_version = self._plan, self._plan.version_before(step) + 1
        report_rollouts(groups, plan.params.max_new_tokens, plan.max_prompt_tokens, next_version, meter)
        self._record(step, groups, epoch)
        return groups


class GeneratedRollouts:
    """Draws prompts, lets the engines answer with the newest weights, and marks the answers. The driver does the
    thinking.
    """

    def __init__(self, prompts: PromptStream, answering: Answering, plan: RolloutPlan, marking: Marking) -> None:
        self._prompts = prompts
        self._answering = answering
        self._plan = plan
        self._marking = marking

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""
        return self._prompts.epoch

    def collect(self, step: int, meter: Meter) -> Sequence[Group]:
        """The step's scored groups on the driver, [] elsewhere. Collective."""
        plan = self._plan
        prompts = self._prompts.draw(plan.prompts_per_step)
        seed_parts = (plan.seed, "sampling", step)
        questions = Questions(str(step), prompts, plan.group_size, plan.params, seed_parts, self._marking.begin)
        version = plan.version_before(step)
        (groups,) = self._answering.answer([questions], version, "timing_s/gen", meter, meter)
        marked = self._marking.mark(step, groups, self.epoch, meter)
        self._prompts.report(meter)
        self._answering.report(meter)
        return marked
