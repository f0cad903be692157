"""Rollouts that were recorded: written by a run that generates, read by one that only trains.

A recording is a directory with one file per step of the main stage, ``step_NNNNNN.jsonl``. A file is complete or
absent. Samples come back bit for bit, so that training on them gives the bits of the run that recorded them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megarl.checkpoint.directory import sync_directory
from megarl.core.errors import DataError, MissingInputError, StorageError
from megarl.core.excerpt import excerpt
from megarl.core.protocols import Statistics
from megarl.core.sample import Group
from megarl.core.step_ranges import step_ranges
from megarl.core.world import World
from megarl.data.record import RecordedStep, read_steps, write_groups
from megarl.rollout.statistics import report_rollouts

_FILE = re.compile(r"step_([0-9]{6,15})\.jsonl")


def recorded_steps(directory: Path) -> list[int]:
    """The steps that a recording has, in ascending order."""
    names = (_FILE.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


class Recording:
    """Writes steps down. A step that is made again, after a resume, replaces the earlier one."""

    def __init__(self, directory: Path, world: World) -> None:
        self._directory = directory
        self._world = world

    def write(self, step: int, groups: Sequence[Group], epoch: int) -> None:
        """The step's scored groups, durably, by the driver; other ranks have nothing to write."""
        if not self._world.is_driver:
            return
        path = self._directory / f"step_{step:06d}.jsonl"
        unfinished = path.with_name(f".{path.name}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            unfinished.unlink(missing_ok=True)
            write_groups(unfinished, step, groups, epoch=epoch)
            with unfinished.open("rb+") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
            sync_directory(self._directory)
        except OSError as error:
            raise StorageError(
                "MRL-7304",
                f"{path} cannot be recorded: {error.strerror}.\n"
                "Free some space there, or record to another directory; then run the same command again.",
            ) from error


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """What the model takes, and the lengths that statistics compare with."""

    vocab_size: int
    max_tokens: int
    max_new_tokens: int
    max_prompt_tokens: int


class RecordedRollouts:
    """A recording in the place of engines."""

    def __init__(self, directory: Path, limits: ReplayLimits, world: World) -> None:
        if world.is_driver and not directory.is_dir():
            raise MissingInputError("MRL-4103", f"{directory}: there is no such recording. Give its directory.")
        self._directory = directory
        self._limits = limits
        self._world = world
        self._epoch = 0

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts, when the latest collected step was recorded."""
        return self._epoch

    def collect(self, step: int, meter: Statistics) -> Sequence[Group]:
        """The step's groups on the driver, [] elsewhere."""
        if not self._world.is_driver:
            return []
        recorded = self._read(step)
        for group in recorded.groups:
            self._require_fit(group, step)
        self._epoch = recorded.epoch
        report_rollouts(recorded.groups, self._limits.max_new_tokens, self._limits.max_prompt_tokens, step, meter)
        return recorded.groups

    def _read(self, step: int) -> RecordedStep:
        path = self._directory / f"step_{step:06d}.jsonl"
        if not path.is_file():
            steps = recorded_steps(self._directory)
            has = f"steps {step_ranges(steps)}" if steps else "no steps at all"
            raise MissingInputError(
                "MRL-4103",
                f"{self._directory} has no recording of step {step}; it has {has}.\n"
                "Set run.num_steps to what was recorded, or give another directory.",
            )
        try:
            steps_of_file = read_steps(path)
        except OSError as error:
            raise MissingInputError("MRL-4103", f"{path} cannot be read ({error.strerror}).") from error
        if list(steps_of_file) != [step]:
            raise DataError("MRL-2302", f"{path}:1 is not a recording of step {step} alone.")
        return steps_of_file[step]

    def _require_fit(self, group: Group, step: int) -> None:
        """Recorded by another model, ids could be beyond the table of embeddings."""
        limits = self._limits
        who = f"step {step} of {self._directory}: prompt {excerpt(group.prompt.id)}"
        for sample in group.samples:
            if len(sample.token_ids) > limits.max_tokens:
                raise DataError(
                    "MRL-2303",
                    f"{who} has a sample of {len(sample.token_ids)} tokens; the model has {limits.max_tokens} "
                    "positions. Replay with the model that it was recorded with.",
                )
        bad = next((bad for ids in _ids(group) if (bad := _beyond(ids, limits.vocab_size)) is not None), None)
        if bad is not None:
            raise DataError(
                "MRL-2303",
                f"{who} has the token id {bad}; the model's vocabulary has {limits.vocab_size} tokens.\n"
                "Replay with the model that it was recorded with.",
            )


def _ids(group: Group) -> list[NDArray[np.int64]]:
    return [group.prompt.token_ids, *(sample.token_ids for sample in group.samples)]


def _beyond(token_ids: NDArray[np.int64], vocab_size: int) -> int | None:
    """The first id that no token has."""
    bad = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    return int(bad[0]) if len(bad) else None
