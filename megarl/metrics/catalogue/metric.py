"""What is known of a metric before any run: its name, how it is reduced, its unit, its formula, its other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COUNT_UNITS = {
    "steps",
    "epochs",
    "updates",
    "samples",
    "tokens",
    "tokens²",
    "bytes",
    "version",
    "prompts",
    "failures",
    "servers",
    "requests",
    "level",
}
EVERY_STEP = "every step"


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the table.

    * ``{mean,max,min}`` in several fields expands in parallel: first with first, second with second.
    * ``{task}``, ``{infix}``, ``{k}`` are filled in by the run. An infix is ``cluster/phase``:
      ``actor_train/train_step``.
    * ``reduction`` is a kind of `metrics.values`, or ``derived``: computed once by the driver from other values.
    * ``aliases`` are spellings of the same value: in the dialect of ROLL, veRL or Trinity-RFT, or ``base``, a spelling
      that only the view ``all`` has. See `trackers.views`.
    * ``when`` says in which runs and steps it is there.
    """

    name: str
    reduction: str
    unit: str
    doc: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    when: str = EVERY_STEP

    @property
    def is_whole(self) -> bool:
        """Whether values are whole numbers and are written as such."""
        return self.unit in COUNT_UNITS and self.reduction != "mean"
