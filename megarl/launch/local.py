"""Ranks on this machine: start them, watch them, and let none outlive the others."""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from megarl.core.errors import EXIT_OK, Preempted
from megarl.launch.kept import KeptRank, end_ranks
from megarl.launch.line import LINE, new_line
from megarl.launch.network import LOOPBACK
from megarl.launch.rendezvous import RankRecord, hand_over, local_record
from megarl.launch.watch import RankState, Verdict, Watch
from megarl.run.stop import SIGNALS, StopRequest, stopped_at_the_start

# How a rank learns which process started it.
LAUNCHER_PID = "MEGARL_LAUNCHER_PID"

_EXIT_BY_SIGNAL = 128  # plus the signal's number: what a shell reports
_POLL_SECONDS = 0.25
_SECONDS_TO_DIE = 5.0


@dataclass(frozen=True, slots=True)
class Program:
    """What all ranks execute."""

    # the words after ``megarl``
    arguments: Sequence[str]
    # where ranks other than the driver write, and tracebacks
    logs: Path
    # what the user does after a failure that nobody explained
    way_out: str
    # after so many seconds without progress somebody hangs; None: nobody does
    hang_timeout: float | None
    environment: Mapping[str, str] = field(default_factory=dict)


def run_ranks(num_ranks: int, program: Program) -> int:
    """Run all ranks to the end. The first failure ends the others and decides the exit code.

    A request to stop is passed on: the ranks finish their step, save, and leave. The second request ends them at once.
    """
    # Rank 0 inherits it and serves there; the others may come at once.
    with socket.create_server((LOOPBACK, 0), backlog=num_ranks) as meeting:
        ranks = [_Local(rank, num_ranks, program, meeting) for rank in range(num_ranks)]
    states = {rank.kept.state.rank: rank.kept.state for rank in ranks}
    stop = StopRequest()
    try:
        _pass_signals_on(stop, ranks)
        verdict = _watch(ranks, Watch(states, program.hang_timeout, str(program.logs), program.way_out))
    except BaseException:  # the second request, or a mistake of ours
        _end(ranks, None)
        raise
    _end(ranks, verdict)
    # torch, which opening the inputs has loaded, is not searched for garbage when this process ends: on a busy machine
    # that takes many seconds
    gc.freeze()
    if verdict is None:
        return EXIT_OK
    return _report(verdict, ranks, stop)


class _Local:
    """One rank of this machine, a child of this process."""

    def __init__(self, rank: int, num_ranks: int, program: Program, meeting: socket.socket) -> None:
        own, theirs = new_line()
        with theirs:
            record = local_record(rank, num_ranks, meeting.getsockname()[1], meeting.fileno())
            self.process = _start(record, program, theirs, meeting)
        now = time.monotonic()
        self.kept = KeptRank(RankState(rank, socket.gethostname(), now, now), self.process.pid, own)

    def look(self, now: float) -> None:
        self.kept.drain()
        self.kept.look(now)
        if self.kept.state.ended is not None and self.kept.state.returncode is None:
            self.kept.state.returncode = self.process.wait()
            self.kept.state.is_done = self.process.returncode == EXIT_OK


def _pass_signals_on(stop: StopRequest, ranks: list[_Local]) -> None:
    def handle(number: int, _: object) -> None:
        if stop.take(number, time.monotonic()):
            for known in SIGNALS:  # tidying up is quick, and impatience must not cut it short
                signal.signal(known, signal.SIG_IGN)
            sys.exit(_EXIT_BY_SIGNAL + number)
        for rank in ranks:
            rank.process.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, handle)


def _start(
    record: RankRecord, program: Program, line: socket.socket, meeting: socket.socket
) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // record.size)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **program.environment,
        **hand_over(record),
        LAUNCHER_PID: str(os.getpid()),
        LINE: str(line.fileno()),
        # All ranks are on this machine: their sockets need not be seen by any other.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "megarl", *program.arguments]
    if record.rank == 0:
        return _spawn(command, environment, [line, meeting], None)
    with open(program.logs / f"rank_{record.rank}.log", "ab") as log:
        return _spawn(command, environment, [line], log)


def _spawn(
    command: list[str], environment: dict[str, str], inherited: list[socket.socket], log: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    """A session of its own: Ctrl-C reaches this process, which then ends the ranks in order."""
    return subprocess.Popen(
        command,
        env=environment,
        pass_fds=[end.fileno() for end in inherited],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def _watch(ranks: list[_Local], watch: Watch) -> Verdict | None:
    """Until all ranks are done, or there is a reason to end them."""
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            selector.register(rank.kept.process, selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select(_POLL_SECONDS):
                selector.unregister(key.fd)
            now = time.monotonic()
            for rank in ranks:
                rank.look(now)
            verdict = watch.judge(now)
            if verdict is not None:
                return verdict
    return None


def _end(ranks: list[_Local], verdict: Verdict | None) -> None:
    """Nobody stays. If somebody hangs, everybody's stacks are written down."""
    alive = [rank for rank in ranks if rank.process.poll() is None]
    if verdict is not None and verdict.is_hang:
        end_ranks([rank.kept for rank in alive], verdict.exit_code, with_stacks=True)
    for rank in alive:
        rank.process.kill()
    deadline = time.monotonic() + _SECONDS_TO_DIE
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it, at a disk that does not answer
            rank.process.wait(max(0.0, deadline - time.monotonic()))


def _report(verdict: Verdict, ranks: list[_Local], stop: StopRequest) -> int:
    """One voice: the failure that explains the others, told once."""
    asked = stop.received
    early = [rank for rank in ranks if asked and rank.process.returncode in (-asked, _EXIT_BY_SIGNAL + asked)]
    if asked is not None and early and all(rank.kept.state.words is None for rank in ranks):
        # It was asked to stop before it could listen.
        told = stopped_at_the_start(asked)
        sys.stderr.write(f"{told}\n")
        return Preempted.exit_code
    sys.stderr.write(f"{verdict.message}\n")
    return verdict.exit_code
