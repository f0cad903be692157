"""The loop. Every rank runs it; what differs between algorithms, engines and layouts is in the objects it is given."""

from __future__ import annotations

from functools import partial

from megarl.core import faults
from megarl.data.distribute import distribute
from megarl.data.pack import pack
from megarl.metrics.meter import Meter
from megarl.run.build import Run


def train(run: Run, num_done: int) -> None:
    """All stages of a run, from the first step after the ``num_done`` that a checkpoint holds. Collective."""
    world, enter = run.world, run.residency.phase
    reach = partial(faults.reach, rank=run.world.rank)
    if num_done == 0:
        opening = Meter()
        run.evaluator.evaluate_if_due(0, opening)
        run.recorder.record_opening(opening, world)
    meter = run.checkpoints.after(num_done, run.recorder.latest)
    for stage in run.stages_after(num_done):
        run.recorder.announce(stage.headline)
        algorithm = stage.algorithm
        for step in stage.enter(num_done):
            with meter.timed("timing_s/step_wall"):
                with meter.timed("timing_s/step"):
                    reach("step/rollout", step=step)
                    stage.refresh_engines(step - 1, meter)
                    with enter(stage.rollouts.phase, meter):
                        groups = stage.rollouts.collect(step, meter)
                    algorithm.credit_groups(groups, meter)
                    batch = distribute(pack(groups, stage.plan) if world.is_driver else None, world)
                    reach("step/annotate", step=step)
                    for annotator in stage.annotators:
                        with meter.timed(annotator.annotation_timer), enter(annotator.forward_phase, meter):
                            batch = annotator.annotate(batch)
                    with meter.timed("timing_s/adv"):
                        batch = algorithm.credit_tokens(batch, world, meter)
                    reach("step/update", step=step)
                    for learner in stage.learners(step):
                        with meter.timed(learner.update_timer), enter(learner.train_phase, meter):
                            meter.merge(learner.update(batch, algorithm))
                run.evaluator.evaluate_if_due(step, meter)
            reach("step/record", step=step)
            run.recorder.record(step, stage, meter, world)
            reach("step/end", step=step)
            meter = run.checkpoints.after(step, run.recorder.latest)
    run.checkpoints.finish()
