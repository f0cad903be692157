"""Asking a run to stop: SIGTERM, SIGUSR1 or Ctrl-C once to finish the step and save, once more to leave at once.

Nothing here imports torch, so that a rank listens from its first moment.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from signal import Signals

from megarl.core.errors import PreemptedIdle

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# Only these insist: a scheduler warns with SIGUSR1 first and sends SIGTERM while the step is still being finished.
_INSISTING = (signal.SIGTERM, signal.SIGINT)
# A terminal, a launcher and a scheduler may each deliver one and the same request.
_ONE_REQUEST_SECONDS = 1.0


def stopped_at_the_start(number: int) -> PreemptedIdle:
    """What a run says that was asked to stop before it had anything to save."""
    return PreemptedIdle("MRL-8002", f"stopped by {Signals(number).name} at the start.\nRun the same command to go on.")


class StopRequest:
    """Whether this process was asked to stop. Ranks may be asked at different times; they agree between steps."""

    def __init__(self) -> None:
        # the first signal that asked; None while nobody did
        self.received: Signals | None = None
        # while there is nothing that a stop has to finish or to save, one request is enough
        self.leaves_at_once = False
        self._asked_at: float | None = None

    def take(self, number: int, now: float) -> bool:
        """A signal arrived at ``now`` (seconds). True: leave at once, for it is the second request, or the first when
        there is nothing to finish."""
        self.received = self.received or Signals(number)
        if self.leaves_at_once:
            return True
        if number not in _INSISTING:
            return False
        if self._asked_at is None:
            self._asked_at = now
        return now - self._asked_at > _ONE_REQUEST_SECONDS


def watch_signals(request: StopRequest, leave: Callable[[int], None]) -> None:
    """Take signals into ``request`` for the rest of the process; ``leave`` is called when it says so.

    A thread reads them from a pipe, because Python's own handlers wait for the main thread, which may be waiting in a
    collective. Ctrl-C stays ignored where it already is (a shell's background jobs).

    Slurm sends a warning to every process of a job, and one that does not expect SIGUSR1 would die of it. So only the
    thread listens to it; all other threads, and all processes that are started from here on, have it blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)

    def watch() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        while True:
            for number in os.read(reading, 64):
                if number in SIGNALS and request.take(number, time.monotonic()):
                    leave(number)

    threading.Thread(target=watch, name="signals", daemon=True).start()
