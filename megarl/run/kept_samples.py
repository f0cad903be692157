"""Some samples of some steps, written down with what became of every token, for people to look at."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.core.batch import MicroBatch, TrainBatch
from megarl.core.sample import Group
from megarl.core.world import World
from megarl.data.record import write_groups
from megarl.run.timeline import is_kept

logger = logging.getLogger(__name__)

_COLUMNS = {"old_logprobs": "old_logprobs", "token_advantages": "advantages"}


class KeptSamples:
    """The first ``num_groups`` groups of the steps that are kept, as ``step_NNNNNN.jsonl`` in ``directory``."""

    def __init__(self, directory: Path, num_groups: int, last_step: int, world: World) -> None:
        self._directory = directory
        self._num_groups = num_groups
        self._last_step = last_step
        self._world = world
        self._has_warned = False

    def keep(self, step: int, groups: Sequence[Group], batch: TrainBatch) -> None:
        """Write the step's first groups down, if it is time to. Collective."""
        if self._num_groups == 0 or not is_kept(step, self._last_step):
            return
        wanted = [group for group in groups if group.samples][: self._num_groups]
        num_samples = self._world.broadcast(sum(len(group.samples) for group in wanted))
        notes: dict[str, Any] = {}
        if self._world.reports_losses:
            for micro in batch.microbatches():
                notes.update(_notes(micro, num_samples))
        gathered = self._world.gather(notes)
        if gathered is None or not wanted:
            return
        everybody = {index: own for rank in gathered for index, own in rank.items()}
        numbers = iter(range(num_samples))
        notes_of = [[everybody[str(next(numbers))] for _ in group.samples] for group in wanted]
        path = self._directory / f"step_{step:06d}.jsonl"
        try:
            self._directory.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            write_groups(path, step, wanted, notes_of)
        except OSError as error:  # they are for people to look at; the run can do without
            if not self._has_warned:
                logger.warning("%s: samples cannot be kept (%s). The run goes on.", path, error.strerror)
            self._has_warned = True


def _notes(micro: MicroBatch, num_samples: int) -> dict[str, dict[str, list[float]]]:
    """Of the sequences with a number below ``num_samples``: what each token got, by the sequence's number as text."""
    edges = micro.cu_seqlens.tolist()
    columns = {name: getattr(micro, column) for name, column in _COLUMNS.items()}
    return {
        str(index): {
            name: column[edges[row] : edges[row + 1]].tolist() for name, column in columns.items() if column is not None
        }
        for row, index in enumerate(micro.sample_index.tolist())
        if 0 <= index < num_samples
    }
