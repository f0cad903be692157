"""When held-out sets are evaluated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Step 0 is before training. ``stage_ends`` are the stages' last steps; the last stage is the algorithm's own.

    Its steps are counted from its beginning, so that ``every`` means the same with and without a warm-up.
    """

    every: int
    before_training: bool
    at_end: bool
    stage_ends: tuple[int, ...]

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after ``step``."""
        start = self.stage_ends[-2] if len(self.stage_ends) > 1 else 0
        if step in (0, start):
            return self.before_training
        if step == self.stage_ends[-1] and self.at_end:
            return True
        return self.every > 0 and step > start and (step - start) % self.every == 0

    def is_end(self, step: int) -> bool:
        """Whether ``step`` is the last of the run."""
        return step == self.stage_ends[-1]
