"""When a run is saved, and how it ends early: between two steps, on all ranks at once."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from signal import Signals

import torch
import torch.distributed as dist

from megarl.checkpoint.store import Checkpoint, CheckpointStore
from megarl.config.schema import CheckpointSettings
from megarl.core.errors import Preempted, PreemptedIdle, StorageError
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.run.progress import Best, Progress
from megarl.run.residency import Residency
from megarl.run.state import RunState
from megarl.run.stop import StopRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A checkpoint is made every so many steps, when a new best is measured, at the run's ``last_step``, and when the
    run is stopped.
    """

    settings: CheckpointSettings
    last_step: int
    # the canonical name of settings.best_metric
    best_metric: str | None = None

    def is_due(self, step: int) -> bool:
        """Whether ``step`` is saved without anybody asking."""
        return step == self.last_step or (self.settings.every > 0 and step % self.settings.every == 0)

    def better(self, best: Best | None, step: int, metrics: dict[str, float]) -> Best | None:
        """The best checkpoint when that of ``step``, with these metrics, is made."""
        value = metrics.get(self.best_metric) if self.best_metric is not None else None
        if value is None or not math.isfinite(value):
            return best
        if best is not None and (value <= best.value if self.settings.best_mode == "max" else value >= best.value):
            return best
        return Best(step, value)


class Checkpoints:
    """What happens between two steps."""

    def __init__(
        self,
        store: CheckpointStore,
        plan: SavePlan,
        state: RunState,
        residency: Residency,
        stop: StopRequest,
        world: World,
    ) -> None:
        self._store = store
        self._plan = plan
        self._state = state
        self._residency = residency
        self._stop = stop
        self._world = world
        # step 0 is what a run without any checkpoint starts from
        self._saved_step = self._first_step = 0
        self._best: Best | None = None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from ``checkpoint``; before the first phase, while all models are on the device. Collective."""
        progress = Progress.from_tree(checkpoint.progress)
        self._state.restore(checkpoint, progress)
        self._saved_step = self._first_step = progress.step
        self._keep_best(progress.best)

    def after(self, step: int, metrics: dict[str, float]) -> Meter:
        """Save if it is time to, and leave if anybody asked to stop. Collective.

        A step's line is in the ledger before its checkpoint is made, so saving counts as part of the next step: what is
        returned is the meter for that one.
        """
        meter = Meter()
        best = self._plan.better(self._best, step, metrics)
        asked, is_better, has_failed = self._agree(best is not self._best)
        if has_failed:
            self._tell_failure(stopping=asked is not None)
        if step != self._saved_step and (asked or is_better or self._plan.is_due(step)):
            with meter.timed("timing_s/step_wall"), meter.timed("timing_s/save_checkpoint"):
                self._save(step, best, meter)
        if asked and step < self._plan.last_step:
            self.finish()
            raise self._preempted(step, asked)
        return meter

    def finish(self) -> None:
        """Wait until everything is on the disk. Collective."""
        self._store.finish()
        self._world.barrier()

    def _agree(self, is_better: bool) -> tuple[Signals | None, bool, bool]:
        """The same answers on all ranks: the signal that any of them was asked to stop by, whether the driver found a
        new best (only it has metrics), and whether the last save failed.
        """
        numbers = torch.tensor([int(self._stop.received or 0), int(is_better), int(self._store.has_failed)])
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._world.control_group)
        number, better, failed = numbers.tolist()
        return (Signals(number) if number else None), bool(better), bool(failed)

    def _tell_failure(self, *, stopping: bool) -> None:
        """The run does not go on without checkpoints; but one that is about to stop tries once more to save."""
        try:
            self._store.finish()
        except StorageError as error:
            if not stopping:
                raise
            if self._world.is_driver:
                logger.warning("%s", error)

    def _save(self, step: int, best: Best | None, meter: Meter) -> None:
        self._keep_best(best)
        self._state.settle(step, meter)
        with self._residency.phase("actor_train/do_checkpoint", meter):
            progress = self._state.progress(step, self._best)
            wait = not self._plan.settings.asynchronous
            self._store.save(step, self._state.slices(), progress.to_tree(), self._state.rank_state(), wait=wait)
        self._saved_step = step

    def _keep_best(self, best: Best | None) -> None:
        self._best = best
        self._store.retain(best.step if best else None)

    def _preempted(self, step: int, asked: Signals) -> Preempted:
        if step == self._first_step:
            where = f"before step {step + 1} of {self._plan.last_step}, the first of this start"
            return PreemptedIdle("MRL-8002", f"stopped by {asked.name} {where}.\nRun the same command to go on.")
        where = f"after step {step} of {self._plan.last_step}, which is saved"
        return Preempted("MRL-8001", f"stopped by {asked.name} {where}.\nRun the same command to go on.")
