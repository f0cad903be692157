"""A rank that the kernel ended because its launcher was killed is told from one that was killed itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from megarl.launch.kept import KeptRank
from megarl.launch.line import new_line
from megarl.launch.watch import RankState

RANK = "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); print('ready', flush=True); time.sleep(1000)"
# As torchrun: many threads and much memory, which take their time to end; the rank hears of it before that.
LAUNCHER = f"""
import subprocess, sys, threading, time
held = bytearray(200 << 20)
for _ in range(16):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
rank = subprocess.Popen([sys.executable, "-S", "-c", {RANK!r}])
print(rank.pid, flush=True)
rank.wait()
time.sleep(1000)
"""


@contextmanager
def launched() -> Iterator[tuple[subprocess.Popen[str], KeptRank]]:
    launcher = subprocess.Popen([sys.executable, "-S", "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        said = sorted([launcher.stdout.readline().strip(), launcher.stdout.readline().strip()])
        assert said[1] == "ready"
        yield launcher, KeptRank(RankState(1, "here", 0.0, 0.0), int(said[0]), new_line()[0])
    finally:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("attempt", range(5))
def test_with_its_launcher(attempt: int) -> None:
    with launched() as (launcher, rank):
        launcher.kill()
        assert rank.has_ended(30.0)
        rank.look(time.monotonic())
        assert rank.state.has_lost_parent


def test_alone() -> None:
    with launched() as (launcher, rank):
        os.kill(rank.pid, signal.SIGKILL)
        assert rank.has_ended(30.0)
        rank.look(time.monotonic())
        assert not rank.state.has_lost_parent
        assert psutil.Process(launcher.pid).is_running()
