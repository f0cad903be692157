"""From prompts to the groups that a step trains on: draw, score, filter, and draw again for what was lost.

A step wants ``prompts_per_step`` groups. Those that a failed reward or a filter takes away leave gaps, and a refill
draws exactly as many new prompts as there are gaps. So a step never has too many groups, nothing waits for a later
step, every prompt that is drawn is trained on or dropped in the step that drew it, and a run that resumes draws the
same ones again. After ``max_refills`` rounds the step trains on what it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from megarl.core.sample import Group, Prompt, Sample
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.rewards.scorer import Scorer
from megarl.rollout.filters import Filters
from megarl.rollout.rollout_plan import RolloutPlan
from megarl.rollout.serving import SCORE, Enter
from megarl.rollout.statistics import report_rollouts

logger = logging.getLogger(__name__)

# writes a step's scored groups down, with the epoch that they belong to
Record = Callable[[int, Sequence[Group], int], None]
# (refill, number of prompts) -> unscored groups on the driver, [] elsewhere; collective. Refill 0 comes first.
Draw = Callable[[int, int], Sequence[Group]]


def keep_no_record(step: int, groups: Sequence[Group], epoch: int) -> None:
    """For runs that record nothing."""


class Marking:
    """What every rollout goes through, whoever draws it: it is scored, filtered, reported and, if asked, recorded."""

    def __init__(
        self, scorer: Scorer, filters: Filters, plan: RolloutPlan, enter: Enter, record: Record, world: World
    ) -> None:
        self._scorer = scorer
        self._filters = filters
        self._plan = plan
        self._enter = enter
        self._record = record
        self._world = world

    def begin(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score a sample that is drawn, in the background. Of the driver."""
        self._scorer.submit(prompt, sample)

    def fill(self, step: int, draw: Draw, meter: Meter) -> list[Group]:
        """The groups that ``step`` trains on: on the driver, [] elsewhere. Collective."""
        plan = self._plan
        kept: list[Group] = []
        missing, num_drawn, num_refills = plan.prompts_per_step, 0, 0
        for refill in range(plan.max_refills + 1):
            drawn = draw(refill, missing)
            with meter.timed("timing_s/reward"), self._enter(SCORE, meter):
                scored = self._scorer.finish(drawn, meter, is_refill=refill > 0)
            kept += self._filters.apply(scored, meter)
            num_drawn, num_refills = num_drawn + len(drawn), refill
            missing = plan.prompts_per_step - len(kept)
            if refill == plan.max_refills or self._world.broadcast(missing <= 0):
                break
        if self._world.is_driver:
            self._report(step, len(kept), num_drawn, num_refills, meter)
        return kept

    def finish(self, step: int, groups: Sequence[Group], epoch: int, meter: Meter) -> None:
        """What ``step`` trains on is settled: report it and write it down."""
        plan, next_version = self._plan, self._plan.version_before(step) + 1
        report_rollouts(groups, plan.params.max_new_tokens, plan.max_prompt_tokens, next_version, meter)
        self._record(step, groups, epoch)

    def _report(self, step: int, num_kept: int, num_drawn: int, num_refills: int, meter: Meter) -> None:
        wanted = self._plan.prompts_per_step
        if self._filters.is_active or self._plan.max_refills:
            meter.sum("experience_pipeline/num_drawn_groups", num_drawn)
            meter.mean("experience_pipeline/keep_ratio", num_kept, num_drawn)
            meter.sum("experience_pipeline/num_refills", num_refills)
        if num_kept == 0:
            meter.sum("experience_pipeline/experience_count", 0)
            logger.warning(
                "MRL-2412 step %d: none of the %d groups that were drawn is left, and nothing is learned. "
                "Which filters or rewards dropped them: experience_pipeline/* of the step.",
                step, num_drawn,
            )  # fmt: skip
        elif num_kept < wanted:
            logger.info("step %d trains on %d groups instead of %d", step, num_kept, wanted)
