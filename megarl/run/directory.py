"""The run directory: claimed by one process at a time, and never lost."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import time
from itertools import count
from pathlib import Path
from typing import TextIO

from megarl.config.resolved import dump_resolved
from megarl.config.schema import RunConfig
from megarl.core.errors import RunDirInUseError, StorageError

# one line per start of the run
_STARTS = "starts.log"


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
    def checkpoints(self) -> Path:
        """One directory per checkpoint."""
        return self.path / "checkpoints"

    @property
    def run_id(self) -> Path:
        """The run's name for trackers: stays the same over restarts, and is nobody else's."""
        return self.path / "run_id"

    @property
    def logs(self) -> Path:
        """Output of ranks other than the driver, and tracebacks."""
        return self.path / "logs"

    def begin(self, config: RunConfig) -> None:
        """Write down that the run starts, or starts again, with this configuration."""
        try:
            self.logs.mkdir(exist_ok=True)
            if not self.run_id.is_file():
                self.run_id.write_text(secrets.token_hex(4), encoding="ascii")
            unfinished = self.resolved_config.with_suffix(".yaml.new")
            unfinished.write_text(dump_resolved(config), encoding="utf-8")
            unfinished.rename(self.resolved_config)
            with (self.logs / _STARTS).open("a", encoding="utf-8") as starts:
                starts.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {_who()}\n")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def release(self) -> None:
        """Let another run have the directory."""
        self._lock.close()


def claim(config: RunConfig, *, fresh: bool) -> RunDirectory:
    """Take ``run.dir/run.name`` for this process, and make it if it is not there.

    ``fresh``: a directory of that name is kept, but out of the way: it moves to ``name.1``, ``name.2``, … A directory
    whose run is still alive is refused. The lock is beside the directory, is taken before anything is touched, and
    vanishes with its process.
    """
    path = Path(config.run.dir) / config.run.name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        if fresh and path.exists():
            path.rename(_next_free(path))
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return RunDirectory(path, lock)


def hold(path: Path) -> TextIO:
    """Lock an existing run directory, so that no run begins in it; refused while one is alive."""
    return _lock(path)


def num_restarts(directory: Path) -> int:
    """How often the run in ``directory`` was started again."""
    starts = directory / "logs" / _STARTS
    return max(0, len(starts.read_text(encoding="utf-8").splitlines()) - 1) if starts.is_file() else 0


def _unwritable(path: Path, error: OSError) -> StorageError:
    return StorageError("MRL-7002", f"run directory {path} cannot be written: {error.strerror}.")


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
    lock.write(f"{_who()}\n")
    lock.flush()
    return lock


def _who() -> str:
    return f"pid {os.getpid()} on {socket.gethostname()}"


def _next_free(path: Path) -> Path:
    return next(kept for n in count(1) if not (kept := path.with_name(f"{path.name}.{n}")).exists())
