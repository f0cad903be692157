"""A rank's process in the hands of who watches over it: listen to it, look at it, end it and see its stacks."""

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
        self._parent_pid, self._parent = self._open_parent()

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
            self.state.has_lost_parent = self._has_lost_parent()
        is_stopped = self.state.ended is None and self._kernel_state() in ("T", "t")
        if not is_stopped:
            self.state.stopped = None
        elif self.state.stopped is None:
            self.state.stopped = now

    def has_ended(self, seconds: float) -> bool:
        """Whether the process ends within this time."""
        return _is_readable(self.process, seconds)

    def ask_to_leave(self, exit_code: int, *, with_stacks: bool) -> None:
        """A stopped process must run to hear it. It asks nobody else, so that it does not go on with its work."""
        with contextlib.suppress(OSError):
            message = {"leave": exit_code, "stacks": with_stacks}
            self.line.send(json.dumps(message).encode(), socket.MSG_DONTWAIT)
        self.send(signal.SIGCONT)

    def send(self, number: int) -> None:
        """This signal, if the process is still there."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)

    def _open_parent(self) -> tuple[str, int | None]:
        """Number and descriptor of who started the rank: when that is killed, the kernel ends the rank with it."""
        pid = "".join(self._status()[1:2])
        try:
            return pid, os.pidfd_open(int(pid))
        except (OSError, ValueError):  # it is gone, or outside of this container
            return pid, None

    def _has_lost_parent(self) -> bool:
        """The rank ends a moment before a parent that was killed has ended; but that is then already dying."""
        return self._parent is not None and (_is_readable(self._parent, 0.0) or _is_being_killed(self._parent_pid))

    def _kernel_state(self) -> str:
        return next(iter(self._status()), "")

    def _status(self) -> list[str]:
        """The kernel's words on the process: its state, its parent and more; none if it is gone."""
        try:
            status = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return status.rpartition(")")[2].split()  # the name before it may contain anything


def _is_readable(descriptor: int, seconds: float) -> bool:
    return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])


def end_ranks(ranks: Sequence[KeptRank], exit_code: int, *, with_stacks: bool) -> None:
    """All of them at once, so that many take no longer than one: those that listen by themselves, the rest by force."""
    for rank in ranks:
        rank.ask_to_leave(exit_code, with_stacks=with_stacks)
    stuck = _not_ended(ranks, _SECONDS_TO_LEAVE)
    if stuck and with_stacks:
        for rank in stuck:
            rank.send(STACKS_SIGNAL)
        stuck = _not_ended(stuck, _SECONDS_FOR_STACKS)  # nobody says when they are written
    for rank in stuck:
        rank.send(signal.SIGKILL)
    _not_ended(stuck, _SECONDS_TO_LEAVE)


def _not_ended(ranks: Sequence[KeptRank], seconds: float) -> list[KeptRank]:
    deadline = time.monotonic() + seconds
    return [rank for rank in ranks if not rank.has_ended(deadline - time.monotonic())]


def _is_being_killed(pid: str) -> bool:
    """The kernel keeps SIGKILL in the list of waiting signals until the last thread is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # it has ended meanwhile
        return True
    waiting = next((line.split()[1] for line in lines if line.startswith("ShdPnd:")), "0")
    return bool(int(waiting, 16) >> (signal.SIGKILL - 1) & 1)
