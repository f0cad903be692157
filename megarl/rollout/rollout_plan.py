"""What a step generates."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.core.protocols import SamplingParams


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
    # how often a step may draw new prompts in the place of groups that it lost
    max_refills: int = 0

    def version_before(self, step: int) -> int:
        """The version of the trainer's weights when ``step`` begins."""
        return step - 1 if self.learns else 0

    def seed_parts(self, step: int, refill: int) -> tuple[int | str, ...]:
        """What the seeds of a step's samples are made of, beside their places. ``refill`` 0 are its first prompts."""
        first = (self.seed, "sampling", step)
        return (*first, "refill", refill) if refill else first

    def name(self, step: int, refill: int) -> str:
        """What the ids of its requests begin with."""
        return f"{step}/refill_{refill}" if refill else str(step)
