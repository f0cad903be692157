"""The run directory: claimed by one run at a time, never overwritten."""

from __future__ import annotations

import fcntl
import os
import socket
from itertools import count
from pathlib import Path
from typing import TextIO

from megarl.config.resolved import dump_resolved
from megarl.config.schema import RunConfig
from megarl.core.errors import RunDirInUseError, StorageError


class RunDirectory:
    """``runs/<name>/`` while this process holds its lock."""

    def __init__(self, path: Path, lock: TextIO) -> None:
        self.path = path
        self._lock = lock

    @property
    def ledger(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def resolved_config(self) -> Path:
        """The configuration with every default; running it repeats the run."""
        return self.path / "resolved.yaml"

    @property
    def logs(self) -> Path:
        """Output of ranks other than the driver, and tracebacks."""
        return self.path / "logs"

    def release(self) -> None:
        """Let another run have the directory."""
        self._lock.close()


def claim(config: RunConfig) -> RunDirectory:
    """Make a fresh ``run.dir/run.name`` with the resolved configuration in it.

    A finished run of that name is kept: it moves to ``name.1``, ``name.2``, … A directory whose run is still alive is
    refused. The lock is beside the directory, is taken before anything is touched, and vanishes with its process.
    """
    path = Path(config.run.dir) / config.run.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        if path.exists():
            path.rename(_next_free(path))
        path.mkdir()
        directory = RunDirectory(path, lock)
        directory.logs.mkdir()
        directory.resolved_config.write_text(dump_resolved(config), encoding="utf-8")
    except OSError as error:
        raise StorageError("MRL-7002", f"run directory {path} cannot be written: {error.strerror}.") from error
    return directory


def _lock(path: Path) -> TextIO:
    lock = open(path.with_name(f".{path.name}.lock"), "a+", encoding="utf-8")  # noqa: SIM115  (held to the end)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise RunDirInUseError(
            "MRL-6001",
            f"run directory {path} is in use ({lock.read().strip()}).\n"
            "Wait for that run, or give this one another run.name.",
        ) from None
    lock.truncate(0)
    lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _next_free(path: Path) -> Path:
    return next(kept for n in count(1) if not (kept := path.with_name(f"{path.name}.{n}")).exists())
