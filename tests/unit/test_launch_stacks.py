"""Many ranks of one machine that hang are ended as fast as one."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from megarl.launch.kept import KeptRank, end_ranks
from megarl.launch.line import new_line
from megarl.launch.watch import RankState

NUM_RANKS = 16
# what is left of the ten seconds that docs/launching.md promises for everything
ALLOWED_SECONDS = 5.0


@contextmanager
def deaf_ranks() -> Iterator[list[KeptRank]]:
    """They neither write stacks nor leave: the most that anybody can be waited for."""
    command = ["sh", "-c", "trap '' USR2; exec sleep 1000"]
    processes = [subprocess.Popen(command) for _ in range(NUM_RANKS)]
    try:
        for process in processes:
            while psutil.Process(process.pid).name() != "sleep":
                time.sleep(0.005)
        yield [
            KeptRank(RankState(rank, "here", 0.0, 0.0), one.pid, new_line()[0]) for rank, one in enumerate(processes)
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_many_ranks_are_waited_for_at_once() -> None:
    with deaf_ranks() as ranks:
        psutil.Process(ranks[0].pid).send_signal(signal.SIGSTOP)
        began = time.monotonic()
        end_ranks(ranks, 69, with_stacks=True)
        assert time.monotonic() - began < ALLOWED_SECONDS
        assert all(rank.has_ended(0.0) for rank in ranks)
