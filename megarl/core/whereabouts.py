"""Where this rank is: its step and phase, told to whoever watches over it, and every sign that it gets on.

A rank gets on when it begins a step or enters or leaves a phase, and inside of a phase with each

    token decoded, or sample that came from a server      generation.embedded.engine, generation.fleet.dispatch
    turn of a conversation's function                     rollout.rounds
    sample scored                                         rewards.scorer
    micro-batch, of any model, forward                    models.pipeline
    parameter imported, bucket of parameters exported     models.hf_weights
    part of a checkpoint copied, written, hashed or read  checkpoint.rank_file, .manifest, .reading

These are all: whatever a run waits for is made of them, or has a time limit of its own. So `tick` is called there, in
the loop over the parts, and nowhere else. Telling costs a few microseconds and never waits, and any thread may do it;
with nobody listening it does nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from typing import Any

# Signs of progress inside a phase are told at most this often.
_TICK_SECONDS = 1.0


class _Line:
    """The line to the watcher, once somebody watches."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.last_told = -math.inf


_line = _Line()


def report_to(line: socket.socket | None) -> None:
    """From now on tell this socket of packets; None: nobody."""
    _line.socket, _line.last_told = line, -math.inf


def begin_step(step: int) -> None:
    """The next phases belong to this step."""
    tell({"step": step})


def enter(phase: str) -> None:
    """This rank now does this."""
    tell({"phase": phase})


def tick() -> None:
    """This rank is still at it, and gets on."""
    if _line.socket is not None and time.monotonic() - _line.last_told > _TICK_SECONDS:
        tell({})


def wait() -> None:
    """This rank waits for another one, until it tells anything else: it does not get on, and is not to blame.

    Of the main thread: others wait beside the work.
    """
    if _line.socket is not None and threading.current_thread() is threading.main_thread():
        tell({"waits": True})
        _line.last_told = -math.inf  # the next sign of progress says that it is over


def tell(message: dict[str, Any]) -> None:
    """Send one message with the time at which it was true."""
    if _line.socket is None:
        return
    now = time.monotonic()
    _line.last_told = now
    with contextlib.suppress(OSError):  # nobody reads any more, or not fast enough: no reason to stop working
        _line.socket.send(json.dumps({**message, "at": now}).encode(), socket.MSG_DONTWAIT)
