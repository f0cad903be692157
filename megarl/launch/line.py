"""The line between a rank and the process that watches over it: its parent, or its guard. One JSON object per packet.

The rank tells where it is (`core.whereabouts`) and what it had to say in the end; the watcher may tell it to leave. A
thread listens, because the main thread may wait in a collective.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import IO, Any

from megarl.core import whereabouts
from megarl.core.errors import EXIT_INTERNAL

# The number of the inherited socket.
LINE = "MEGARL_LINE"
# Makes a rank write its stacks even if its interpreter is stuck; one that listens does so before it leaves.
STACKS_SIGNAL = signal.SIGUSR2
MAX_PACKET = 65536
_SECONDS_TO_LISTEN = 60.0


def new_line() -> tuple[socket.socket, socket.socket]:
    """The watcher's end and the rank's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class RankLine:
    """The rank's end, from the first moment of the rank to its last."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._stacks: IO[str] | None = None
        self._heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
        signal.signal(STACKS_SIGNAL, signal.SIG_IGN)  # until there is a file to write to
        whereabouts.report_to(end)
        threading.Thread(target=self._listen, name="watcher", daemon=True).start()

    def open_stacks(self, path: Path) -> None:
        """Where stacks go when they are asked for."""
        self._stacks = open(path, "w", encoding="utf-8")  # noqa: SIM115  (to the end of the process)
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)

    def where_the_watch_listens(self) -> list[Any]:
        """Host, port and password; the driver's guard says so soon after its start."""
        address: list[Any] = self._heard.get(timeout=_SECONDS_TO_LISTEN)
        return address

    def leave(self, message: str | None, exit_code: int) -> None:
        """The last words of a rank that failed; without a message: all is done."""
        if message is not None:
            whereabouts.tell({"words": message[: MAX_PACKET // 2], "exit_code": exit_code})
            return
        if self._stacks is not None:
            faulthandler.unregister(STACKS_SIGNAL)
            signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
            path = Path(self._stacks.name)
            if path.stat().st_size == 0:
                path.unlink()
        whereabouts.tell({"done": True})

    def _listen(self) -> None:
        while packet := self._end.recv(MAX_PACKET):
            message = json.loads(packet)
            if "listening" in message:
                self._heard.put(message["listening"])
            if message.get("stacks") and self._stacks is not None:
                faulthandler.dump_traceback(self._stacks, all_threads=True)
            if "leave" in message:
                _leave_now(int(message["leave"]))
        # without it nobody would notice should this rank hang; the others are told by its lost connection
        sys.stderr.write("MRL-9003 the process that watches over this rank is gone; the rank ends.\n")
        _leave_now(EXIT_INTERNAL)


def _leave_now(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
