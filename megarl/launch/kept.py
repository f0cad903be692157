"""One rank's process in the hands of who watches over it: listen to it, look at it, get its stacks, end it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.launch.line import MAX_PACKET, STACKS_SIGNAL
from megarl.launch.watch import RankState

_SECONDS_FOR_STACKS = 1.0
_SECONDS_TO_LEAVE = 1.0


class KeptRank:
    """The watcher's end of a rank's line, and a descriptor of its process, which no other process can be taken for."""

    def __init__(self, state: RankState, pid: int, line: socket.socket) -> None:
        self.state = state
        self.pid = pid
        self.line = line
        self.process = os.pidfd_open(pid)  # readable when the process ends

    def drain(self) -> list[dict[str, Any]]:
        """Take what the rank told since the last time; returns it all the same."""
        messages = []
        with contextlib.suppress(OSError):  # nothing there, or nobody
            while packet := self.line.recv(MAX_PACKET, socket.MSG_DONTWAIT):
                messages.append(json.loads(packet))
        for message in messages:
            self.state.take(message)
        return messages

    def look(self, now: float) -> None:
        """What the kernel says: whether the process has ended, and whether it is stopped."""
        if self.state.ended is None and self.has_ended(0.0):
            self.drain()
            self.state.ended = now
        is_stopped = self.state.ended is None and self._kernel_state() in ("T", "t")
        if not is_stopped:
            self.state.stopped = None
        elif self.state.stopped is None:
            self.state.stopped = now

    def has_ended(self, seconds: float) -> bool:
        """Whether the process ends within this time."""
        return bool(select.select([self.process], [], [], max(0.0, seconds))[0])

    def ask_for_stacks(self) -> None:
        """A stopped process must run to write its stacks; it is ended right afterwards."""
        self._send(STACKS_SIGNAL)
        self._send(signal.SIGCONT)

    def end(self, exit_code: int) -> None:
        """With this exit code, if the process still listens; else by force."""
        with contextlib.suppress(OSError):
            self.line.send(json.dumps({"leave": exit_code}).encode(), socket.MSG_DONTWAIT)
        if not self.has_ended(_SECONDS_TO_LEAVE):
            self._send(signal.SIGKILL)
            self.has_ended(_SECONDS_TO_LEAVE)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def _kernel_state(self) -> str:
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return status.rpartition(")")[2].split()[0]  # the name before it may contain anything


def write_stacks(ranks: Sequence[KeptRank]) -> None:
    """Of all of them at once, so that many take no longer than one. No rank says that it is done: they get a moment."""
    for rank in ranks:
        rank.ask_for_stacks()
    deadline = time.monotonic() + _SECONDS_FOR_STACKS
    for rank in ranks:
        rank.has_ended(deadline - time.monotonic())
