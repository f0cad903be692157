"""One tracker's process, seen from the run: started, told of steps, listened to, ended. No call ever blocks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Report:
    """What a process said: ready, delivered, finished (with the last step); unreachable, refused, failed (why)."""

    kind: str
    step: int
    message: str


class FollowerProcess:
    """A running ``megarl.trackers.follow``. It has a session of its own, so that Ctrl-C is not for it."""

    def __init__(self, run: Path, tracker: str, retry_seconds: float, overrides: Sequence[str]) -> None:
        command = [sys.executable, "-m", "megarl.trackers.follow", f"--retry-seconds={retry_seconds}"]
        (run / "logs").mkdir(exist_ok=True)
        with open(run / "logs" / f"tracker_{tracker}.log", "ab") as log:
            self._process = subprocess.Popen(
                [*command, str(run), tracker, *overrides],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._unread = b""

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._process.pid

    @property
    def reports(self) -> int:
        """The descriptor that becomes readable when there are reports, or when the process is gone."""
        return self._stdout.fileno()

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def wake(self) -> None:
        """There is more in the ledger. A full pipe means that it has not yet read what it was told before."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ValueError):
            os.write(self._stdin.fileno(), b".")

    def announce_end(self) -> None:
        """Nothing will follow."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def read(self) -> Iterator[Report]:
        """What it has said since the last time."""
        with contextlib.suppress(BlockingIOError, ValueError):
            while chunk := os.read(self._stdout.fileno(), 65536):
                self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            said = json.loads(line)
            yield Report(said["report"], int(said.get("step", -1)), str(said.get("message", "")))

    def end(self) -> None:
        """End it now, with whatever its package has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.announce_end()
        self._stdout.close()
