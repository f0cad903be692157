"""Rollouts that the current policy generates, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.sample import Group
from megarl.metrics.meter import Meter
from megarl.rollout.answering import Answering, Questions
from megarl.rollout.marking import Marking
from megarl.rollout.prompt_stream import PromptStream
from megarl.rollout.rollout_plan import RolloutPlan


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
        plan, version = self._plan, self._plan.version_before(step)

        def draw(refill: int, num_prompts: int) -> Sequence[Group]:
            questions = Questions(
                plan.name(step, refill),
                self._prompts.draw(num_prompts),
                plan.group_size,
                plan.params,
                plan.seed_parts(step, refill),
                self._marking.begin,
            )
            (groups,) = self._answering.answer([questions], version, "timing_s/gen", meter, meter)
            return groups

        groups = self._marking.fill(step, draw, meter)
        self._marking.finish(step, groups, self.epoch, meter)
        self._prompts.report(meter)
        self._answering.report(meter)
        return groups
