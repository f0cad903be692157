"""Slurm sends SIGUSR1 to every process of a job: the rank takes it, and what the rank started survives it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil

RANK = """
import subprocess, sys, time
from megarl.run.stop import StopRequest, watch_signals

request = StopRequest()
watch_signals(request, lambda number: None)
program = "input(); print('the child goes on', flush=True)"
child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
print(child.pid, flush=True)
while request.received is None:
    time.sleep(0.01)
child.communicate(b"\\n")
print(request.received.name, child.returncode, flush=True)
"""


def test_a_warning_reaches_the_rank_and_spares_its_children() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as rank:
        assert rank.stdout is not None
        child = psutil.Process(int(rank.stdout.readline()))
        child.send_signal(signal.SIGUSR1)
        rank.send_signal(signal.SIGUSR1)
        assert rank.communicate(timeout=60)[0] == "the child goes on\nSIGUSR1 0\n"
