"""Who listens to `core.whereabouts`, for tests."""

from __future__ import annotations

import socket
from collections.abc import Callable

from megarl.core import whereabouts
from megarl.launch.line import MAX_PACKET, new_line


def tells(work: Callable[[], object]) -> bool:
    """Whether this process told its watcher that it gets on while it did the work."""
    own, watchers = new_line()
    with own, watchers:
        whereabouts.report_to(own)
        try:
            work()
        finally:
            whereabouts.report_to(None)
        try:
            return bool(watchers.recv(MAX_PACKET, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
