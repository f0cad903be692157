"""The loop. Every rank runs it; what differs between algorithms, engines and layouts is in the objects it is given."""

from __future__ import annotations

from megarl.data.distribute import distribute
from megarl.data.pack import pack
from megarl.metrics.meter import Meter
from megarl.run.build import Run


def train(run: Run) -> None:
    """All stages of a run, from step 1 to the last. Collective."""
    world, enter = run.world, run.residency.phase
    opening = Meter()
    run.evaluator.evaluate_if_due(0, opening)
    run.recorder.record_opening(opening, world)
    for stage in run.stages:
        stage.begin()
        run.recorder.announce(stage.headline)
        algorithm = stage.algorithm
        for step in range(stage.first_step, stage.last_step + 1):
            meter = Meter()
            with meter.timed("timing_s/step_wall"):
                with meter.timed("timing_s/step"):
                    stage.refresh_engines(step - 1, meter)
                    with enter(stage.rollouts.phase, meter):
                        groups = stage.rollouts.collect(step, meter)
                    algorithm.credit_groups(groups, meter)
                    batch = distribute(pack(groups, stage.plan) if world.is_driver else None, world)
                    for annotator in stage.annotators:
                        with meter.timed(annotator.annotation_timer), enter(annotator.forward_phase, meter):
                            batch = annotator.annotate(batch)
                    with meter.timed("timing_s/adv"):
                        batch = algorithm.credit_tokens(batch, world, meter)
                    for learner in stage.learners(step):
                        with meter.timed(learner.update_timer), enter(learner.train_phase, meter):
                            meter.merge(learner.update(batch, algorithm))
                run.evaluator.evaluate_if_due(step, meter)
            run.recorder.record(step, stage, meter, world)
