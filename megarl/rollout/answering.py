"""From prompts to groups: what rollouts and evaluations ask for, however the answers come about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megarl.core.protocols import SamplingParams, Statistics
from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.meter import Meter

# takes a sample as soon as it is drawn, while others still are; of the driver, from any thread
OnSample = Callable[[Prompt, Sample], None]


def take_no_notice(prompt: Prompt, sample: Sample) -> None:
    """For whoever wants samples only when all are there."""


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts to be answered ``num_samples`` times each. Of the driver; other ranks have no prompts.

    The requests' ids begin with ``name``. A sample's seed is made of ``seed_parts``, its prompt's place and its own
    place in the group, so that the same draws come out of any engine in any layout.
    """

    name: str
    prompts: Sequence[Prompt]
    num_samples: int
    params: SamplingParams
    seed_parts: tuple[int | str, ...]
    on_sample: OnSample = take_no_notice


class Answering(Protocol):
    """A way to answer prompts: one turn, or a conversation."""

    def answer(
        self, questions: Sequence[Questions], version: int, timer: str, meter: Meter, statistics: Statistics
    ) -> list[list[Group]]:
        """The groups of each entry, unscored, on the driver; [] each elsewhere. All are asked for at once.

        Weights ``version`` answer. Generating counts as ``timer``; what the engines say of themselves goes to
        ``statistics``. Collective.
        """

    def report(self, statistics: Statistics) -> None:
        """What the engines went through since the last time, if they are servers."""
