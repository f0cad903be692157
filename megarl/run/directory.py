"""The run directory: claimed by one run at a time, never overwritten."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

from megarl.config.resolved import dump_resolved
from megarl.config.schema import RunConfig
from megarl.core.errors import RunDirInUseError, StorageError

_LOCK = ".lock"


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
    refused. The lock is the kernel's and vanishes with its process.
    """
    path = Path(config.run.dir) / config.run.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep(path)
        path.mkdir()
        (path / "logs").mkdir()
        lock = open(path / _LOCK, "a+", encoding="utf-8")  # noqa: SIM115  (held for the life of the run)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
        directory = RunDirectory(path, lock)
        directory.resolved_config.write_text(dump_resolved(config), encoding="utf-8")
    except OSError as error:
        raise StorageError("MRL-7002", f"run directory {path} cannot be written: {error.strerror}.") from error
    return directory


def _keep(path: Path) -> None:
    """Move an old run out of the way, unless it is still running."""
    lock_path = path / _LOCK
    if lock_path.exists():
        with open(lock_path, "r+", encoding="utf-8") as lock:
            owner = lock.read().strip()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunDirInUseError(
                    "MRL-6001",
                    f"run directory {path} is in use ({owner}). Wait for that run, or give this one another run.name.",
                ) from None
    number = 1
    while (kept := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(kept)
