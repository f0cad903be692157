"""Requests to stop: once to finish the step, twice to leave at once, and one request that arrives twice is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.run.stop import StopRequest

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.mark.parametrize(
    ("arrivals", "leaves"),
    [
        ([(TERM, 10.0)], False),
        ([(INT, 10.0), (INT, 12.0)], True),
        ([(TERM, 10.0), (INT, 12.0)], True),
        # the terminal and the launcher deliver the same Ctrl-C
        ([(INT, 10.0), (TERM, 10.5)], False),
        ([(INT, 10.0), (TERM, 10.5), (TERM, 11.5)], True),
        # a scheduler warns, then asks: the step is still being finished
        ([(USR1, 10.0), (TERM, 60.0)], False),
        ([(USR1, 10.0), (USR1, 60.0)], False),
        ([(USR1, 10.0), (TERM, 60.0), (TERM, 62.0)], True),
    ],
)
def test_only_a_second_request_leaves_at_once(arrivals: list[tuple[int, float]], leaves: bool) -> None:
    request = StopRequest()
    answers = [request.take(number, now) for number, now in arrivals]
    assert answers == [False] * (len(arrivals) - 1) + [leaves]
    assert request.received == arrivals[0][0]


# The main thread is deaf, as it is in a collective: it waits in C for a lock that nobody releases.
LISTENER = """
import os, sys, threading, time
from megarl.run.stop import StopRequest, watch_signals

class Told(StopRequest):
    def take(self, number, now):
        leaves = super().take(number, now + clock[0])
        clock[0] += 10  # the next signal comes later than it does
        print(int(number), flush=True)
        return leaves

clock = [0]
watch_signals(Told(), lambda number: os._exit(128 + number))
print("listening", flush=True)
threading.Lock().acquire() and threading.Event().wait()
"""


def test_signals_are_heard_while_the_main_thread_waits() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        preexec_fn=lambda: signal.signal(INT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    for number in (USR1, TERM, INT):
        process.send_signal(number)
        assert process.stdout.readline() == f"{int(number)}\n"
    process.communicate(timeout=60)
    assert process.returncode == 128 + INT


def test_nothing_here_imports_torch() -> None:
    """A rank must listen from its first moment, not after seconds of imports."""
    code = "import sys, megarl.run.stop; sys.exit('torch' in sys.modules)"
    root = str(Path(__file__).parents[2])
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0
