"""The directory of a run's checkpoints: which there are, and how one appears, is replaced and goes, each at once.

``step_000010`` is a checkpoint. Names that begin with a dot are on their way in (``.staging_``), out (``.removed_``) or
aside while a newer save of the same step takes their place (``.aside_``). Only the driver changes anything here.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from itertools import count
from pathlib import Path

from megarl.checkpoint import manifest
from megarl.core.faults import reach
from megarl.core.world import DRIVER

_STEP = re.compile(r"step_(\d{6,})")
_ASIDE = re.compile(r"\.aside_(step_\d{6,})_[0-9a-f]+")
_LEFTOVERS = (".staging_*", ".removed_*")


def step_directory(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return directory / f"step_{step:06d}"


def steps_present(directory: Path) -> list[int]:
    """Steps that have a directory, whole or not, in ascending order."""
    if not directory.is_dir():
        return []
    names = (_STEP.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(name[1]) for name in names if name)


def complete_steps(directory: Path) -> list[int]:
    """Steps that have a manifest, in ascending order. Nothing is verified."""
    steps = steps_present(directory)
    return [step for step in steps if (step_directory(directory, step) / manifest.FILE_NAME).is_file()]


def newest_step(directory: Path) -> int | None:
    """The newest step that has a manifest. Nothing is verified."""
    return max(complete_steps(directory), default=None)


def stage(directory: Path, step: int) -> Path:
    """A fresh directory that nobody takes for a checkpoint."""
    if not directory.is_dir():
        directory.mkdir(parents=True)
        sync_directory(directory.parent)
    staging = directory / f".staging_step_{step:06d}_{secrets.token_hex(4)}"
    staging.mkdir()
    return staging


def publish(staging: Path, step: int) -> None:
    """Make a complete staging directory the checkpoint of its step, durably.

    If the step has one already, that one steps aside first: until the new one has its name, `recover` brings it back.
    """
    target = step_directory(staging.parent, step)
    sync_directory(staging)
    reach("save/before-rename", rank=DRIVER, step=step)
    aside = target.with_name(f".aside_{target.name}_{secrets.token_hex(4)}") if target.exists() else None
    if aside is not None:
        target.rename(aside)
    try:
        reach("save/set-aside", rank=DRIVER, step=step)
        staging.rename(target)
    except BaseException:
        if aside is not None:
            aside.rename(target)
        raise
    reach("save/after-rename", rank=DRIVER, step=step)
    sync_directory(staging.parent)
    reach("save/committed", rank=DRIVER, step=step)


def retain(directory: Path, keep: int, best_step: int | None, step: int) -> None:
    """Remove all but the newest ``keep`` checkpoints and the best one; ``step`` has just been published."""
    steps = complete_steps(directory)
    kept = {*steps[-keep:], best_step, step}
    for old in steps:
        if old not in kept:
            path = step_directory(directory, old)
            # Renamed first: a checkpoint that is half removed must not look like one.
            path.rename(directory / f".removed_{path.name}_{secrets.token_hex(4)}")
            reach("save/removing", rank=DRIVER, step=step)
    for path in [*directory.glob(".removed_*"), *directory.glob(".aside_*")]:
        discard(path)
    reach("save/retained", rank=DRIVER, step=step)


def recover(directory: Path) -> None:
    """Undo what a killed run left half done: a checkpoint that stepped aside for one that never came returns, the rest
    of what begins with a dot is removed.
    """
    for path in directory.glob(".aside_*"):
        name = _ASIDE.fullmatch(path.name)
        target = directory / name[1] if name else None
        if target is not None and not target.exists():
            path.rename(target)
        else:
            discard(path)
    for pattern in _LEFTOVERS:
        for path in directory.glob(pattern):
            discard(path)


def mark_bad(directory: Path, step: int) -> Path:
    """Keep a damaged checkpoint for inspection, under a name that is no checkpoint's."""
    path = step_directory(directory, step)
    names = (f"{path.name}.bad{f'.{number}' if number else ''}" for number in count())
    bad = next(free for name in names if not (free := path.with_name(name)).exists())
    path.rename(bad)
    return bad


def discard(path: Path) -> None:
    """Remove a directory that is no checkpoint. What resists is tried again at the next save or start."""
    shutil.rmtree(path, ignore_errors=True)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
