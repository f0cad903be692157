"""A rank's process, or a relay, in the hands of a Ray actor: start it, hand its output on. Imports no Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.launch.local import LAUNCHER_PID

# A rank's guard may speak after the rank has ended, and ends within this time.
_SECONDS_FOR_THE_GUARD = 15.0
# A rank that talks faster than it is listened to waits.
_MAX_WAITING = 1 << 22


@dataclass(frozen=True, slots=True)
class Place:
    """A host, a port that is free on it now, and the GPUs that Ray gave to the actor."""

    host: str
    port: int
    devices: str


class HostedRank:
    """One rank as a child process. Its methods are called from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._output = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None

    def place(self) -> Place:
        """Where this is."""
        with socket.create_server(("", 0)) as probe:
            port = int(probe.getsockname()[1])
        return Place(socket.gethostname(), port, os.environ.get("CUDA_VISIBLE_DEVICES", ""))

    def start(self, words: Sequence[str], variables: dict[str, str], directory: str | None) -> None:
        """``python -m megarl WORDS``, here or in ``directory``, as the rank that ``variables`` say."""
        environment = {**_without_ray(), **variables, LAUNCHER_PID: str(os.getpid())}
        command = [sys.executable, "-m", "megarl", *words]
        threading.Thread(target=self._keep, args=(command, environment, directory), daemon=True).start()

    def poll(self, seconds: float) -> tuple[bytes, int | None]:
        """What the rank wrote since the last time, and how it ended once it has; waits for one of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._code is not None, seconds)
            output = bytes(self._output)
            self._output.clear()
            self._changed.notify_all()
            return output, self._code

    def signal(self, number: int) -> None:
        """Pass a signal on; a rank that has not started yet is ended by it when it has."""
        with self._changed:
            self._changed.wait_for(lambda: self._process is not None)
            if self._process is not None:
                self._process.send_signal(number)

    def _keep(self, command: list[str], environment: dict[str, str], directory: str | None) -> None:
        """From start to end in one thread: the kernel ends the rank when the thread that started it is gone."""
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with self._changed:
            self._process = process
            self._changed.notify_all()
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        code = process.wait()
        reader.join(_SECONDS_FOR_THE_GUARD)
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while data := os.read(process.stdout.fileno(), 65536):
            with self._changed:
                self._changed.wait_for(lambda: len(self._output) < _MAX_WAITING)
                self._output += data
                self._changed.notify_all()


class HostedRelay:
    """A relay for reward workers as a child process. It ends when this process does."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def start(self, host: str, token: str, directory: str | None) -> tuple[int, str]:
        """The port on which it listens at ``host``; or 0, and why it does not. It runs here, or in ``directory``."""
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "megarl.rewards.relay", host],
            env=_without_ray(),
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{token}\n")
            process.stdin.flush()  # and it stays open
        said = process.stdout.readline().strip()
        return (int(said), "") if said.isdecimal() else (0, said or "It said nothing; see Ray's logs of that node.")

    @property
    def pid(self) -> int | None:
        """Of the process, once it is started."""
        return self._process.pid if self._process else None

    def close(self) -> None:
        """End it and its workers."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


def _without_ray() -> dict[str, str]:
    """Ranks and relays have no use for Ray, and must not hold the key to the cluster."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
