"""A stage of training: where its groups come from, who annotates them, who learns, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.core.batch import TrainBatch
from megarl.core.protocols import Algorithm, Annotator
from megarl.core.sample import Group
from megarl.data.pack import PackPlan
from megarl.metrics.meter import Meter


class Rollouts(Protocol):
    """A source of groups: the policy's samples, demonstrations, or a recording."""

    @property
    def epoch(self) -> int:
        """Complete passes over the data."""

    def collect(self, step: int, meter: Meter) -> Sequence[Group]:
        """The step's groups on the driver, [] elsewhere; enters the phases that it needs. Collective."""


class LearningModel(Protocol):
    """A model that learns from the batch."""

    train_phase: str
    update_timer: str

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step. Collective."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Steps ``first_step`` to ``last_step`` of a run, both included. GRPO, PPO and SFT differ only in what is in
    here.
    """

    name: str
    # one line for the person at the console
    headline: str
    first_step: int
    last_step: int
    rollouts: Rollouts
    algorithm: Algorithm
    annotators: Sequence[Annotator]
    # step -> the models that learn in it (a critic may train alone at first)
    learners: Callable[[int], Sequence[LearningModel]]
    plan: PackPlan
    # before the first step: optimizers start afresh, references are copied
    begin: Callable[[], None]
    # in the place of `begin` when the stage goes on from a checkpoint: only what is set, nothing that was learned
    resume: Callable[[], None]
    # the phases that its next step may begin with: what they need stays on the device between two steps
    first_phases: tuple[str, ...]

    def enter(self, num_done: int) -> range:
        """Get ready for the steps that are left after ``num_done`` steps of the run: at least one."""
        steps = range(max(self.first_step, num_done + 1), self.last_step + 1)
        (self.begin if steps.start == self.first_step else self.resume)()
        return steps
