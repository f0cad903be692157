"""Which checkpoint of a run is meant: the newest, the best, or that of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megarl.checkpoint.store import Checkpoint, open_checkpoint
from megarl.core.errors import MissingInputError
from megarl.run.progress import Progress

# None: the newest
Step = int | Literal["best"] | None


def open_step(checkpoints: Path, step: Step) -> Checkpoint:
    """The checkpoint in the directory ``checkpoints``. Nothing in it is changed, and nothing is verified yet."""
    if step != "best":
        return open_checkpoint(checkpoints, step)
    newest = open_checkpoint(checkpoints, None)
    best = Progress.from_tree(newest.progress).best
    if best is None:
        raise MissingInputError(
            "MRL-4203",
            f"{checkpoints} has no best checkpoint: none of the run's evaluations gave checkpoint.best_metric.\n"
            "Name a step instead, or set checkpoint.best_metric before training.",
        )
    return open_checkpoint(checkpoints, best.step)
