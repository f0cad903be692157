"""The loop. Every rank runs it; what differs between algorithms, engines and layouts is in the objects it is given."""

from __future__ import annotations

from functools import partial

from megarl.core import faults, whereabouts
from megarl.data.distribute import deal
from megarl.metrics.meter import Meter
from megarl.run.build import Run


def train(run: Run, num_done: int) -> None:
    """All stages of a run, from the first step after the ``num_done`` that a checkpoint holds. Collective."""
    world, residency, recorder = run.world, run.residency, run.recorder
    reach = partial(faults.reach, rank=run.world.rank)
    whereabouts.begin_step(num_done)  # everything is built: from here on, who stands still is missed
    if num_done == 0:
        opening = Meter()
        run.evaluator.evaluate_if_due(0, opening)
        residency.settle(run.phases_after(0))
        recorder.record_opening(opening, world)
    residency.timeline.take()
    meter = run.checkpoints.after(num_done, recorder.latest)
    for stage in run.stages_after(num_done):
        recorder.announce(stage.headline)
        algorithm = stage.algorithm
        for step in stage.enter(num_done):
            whereabouts.begin_step(step)
            with meter.timed("timing_s/step_wall"):
                with meter.timed("timing_s/step"):
                    reach("step/rollout", step=step)
                    with meter.timed("time/wait_explore_step"):
                        groups = stage.rollouts.collect(step, meter)
                    with meter.timed("time/experience_pipeline/total"):
                        algorithm.credit_groups(groups, meter)
                    with meter.timed("time/read_experience"):
                        batch = deal(groups, stage.plan, world, meter)
                    reach("step/annotate", step=step)
                    for annotator in stage.annotators:
                        with meter.timed(annotator.annotation_timer), residency.phase(annotator.forward_phase, meter):
                            batch = annotator.annotate(batch)
                    with meter.timed("timing_s/adv"):
                        batch = algorithm.credit_tokens(batch, world, meter)
                    reach("step/update", step=step)
                    for learner in stage.learners(step):
                        with meter.timed(learner.update_timer), residency.phase(learner.train_phase, meter):
                            meter.merge(learner.update(batch, algorithm))
                run.samples.keep(step, groups, batch)
                run.evaluator.evaluate_if_due(step, meter)
                residency.settle(run.phases_after(step))
            reach("step/record", step=step)
            recorder.record(step, stage, meter, world)
            run.timelines.keep(step)
            reach("step/end", step=step)
            meter = run.checkpoints.after(step, recorder.latest)
    run.checkpoints.finish()
