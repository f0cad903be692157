"""Ranks on this machine: start them, watch them, and let none outlive the others."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from megarl.core.errors import EXIT_INTERNAL, EXIT_OK, Preempted
from megarl.launch.rendezvous import hand_over, local_record
from megarl.run.directory import RunDirectory
from megarl.run.stop import SIGNALS, StopRequest

# How a rank learns which process started it, and where to leave its last words.
LAUNCHER_PID = "MEGARL_LAUNCHER_PID"
LAST_WORDS = "MEGARL_LAST_WORDS"

_EXIT_BY_SIGNAL = 128  # plus the signal's number: what a shell reports
# How long ranks may take to leave by themselves when one has left, or is gone.
_SECONDS_TO_LEAVE = 2.0


def run_ranks(num_ranks: int, directory: RunDirectory) -> int:
    """Run all ranks to the end. The first failure ends the others and decides the exit code.

    A request to stop is passed on: the ranks finish their step, save, and leave. The second request ends them at once.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-") as meeting_place:
        ranks = [_start(rank, num_ranks, directory, Path(meeting_place)) for rank in range(num_ranks)]
        stop = StopRequest()
        try:
            _pass_signals_on(stop, ranks)
            failed = _wait(ranks)
        except SystemExit:
            _end(ranks, 0.0)
            raise
        finally:
            _end(ranks, _SECONDS_TO_LEAVE)
        if failed is None:
            return EXIT_OK
        return _report(failed, ranks[failed].returncode, Path(meeting_place), directory, stop)


def _pass_signals_on(stop: StopRequest, ranks: list[subprocess.Popen[bytes]]) -> None:
    def handle(number: int, _: object) -> None:
        if stop.take(number, time.monotonic()):
            for known in SIGNALS:  # tidying up is quick, and impatience must not cut it short
                signal.signal(known, signal.SIG_IGN)
            sys.exit(_EXIT_BY_SIGNAL + number)
        for process in ranks:
            process.send_signal(number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # a shell's background job ignores Ctrl-C
            signal.signal(number, handle)


def _start(rank: int, num_ranks: int, directory: RunDirectory, meeting_place: Path) -> subprocess.Popen[bytes]:
    threads = max(1, (os.cpu_count() or 1) // num_ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **hand_over(local_record(rank, num_ranks, f"file://{meeting_place}/store")),
        LAUNCHER_PID: str(os.getpid()),
        LAST_WORDS: str(meeting_place / f"last_words_{rank}.json"),
        # All ranks are on this machine: their sockets need not be seen by any other.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "megarl", "train", str(directory.resolved_config)]
    if rank == 0:
        return _spawn(command, environment, None)
    with open(directory.logs / f"rank_{rank}.log", "ab") as log:
        return _spawn(command, environment, log)


def _spawn(command: list[str], environment: dict[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """A session of its own: Ctrl-C reaches this process, which then ends the ranks in order."""
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int | None:
    """Block until all ranks are done or one failed; the number of the first that failed."""
    # a process descriptor becomes readable when its process ends
    descriptors = {os.pidfd_open(process.pid): number for number, process in enumerate(ranks)}
    try:
        with selectors.DefaultSelector() as selector:
            for descriptor in descriptors:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fd)
                    number = descriptors[key.fd]
                    if ranks[number].wait() != EXIT_OK:
                        return number
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _end(ranks: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait so long for the remaining ranks; who is still there then waits for somebody who is gone."""
    deadline = time.monotonic() + seconds
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _report(rank: int, returncode: int, meeting_place: Path, directory: RunDirectory, stop: StopRequest) -> int:
    """One voice: the failure that explains the others, told once."""
    explained = _last_words(meeting_place)
    # A rank that the kernel killed says nothing; what its neighbours say is only that it is gone.
    if explained is not None and not (returncode < 0 and explained[1] == EXIT_INTERNAL):
        message, code = explained
        sys.stderr.write(f"{message}\n")
        return code
    if stop.received is not None and returncode in (-stop.received, _EXIT_BY_SIGNAL + stop.received):
        # It was asked to stop before it could listen.
        early = Preempted("MRL-8001", f"stopped by {stop.received.name} at the start.\nRun the same command to go on.")
        sys.stderr.write(f"{early}\n")
        return early.exit_code
    if returncode < 0:
        what = f"was ended by signal {signal.Signals(-returncode).name}"
    else:
        what = f"ended with exit code {returncode}"
    sys.stderr.write(
        f"MRL-9002 rank {rank} {what} and left no message. See {directory.logs}.\n"
        "Run the same command to go on from the last checkpoint.\n"
    )
    return EXIT_INTERNAL


def _last_words(meeting_place: Path) -> tuple[str, int] | None:
    """What the ranks said before they failed: a mistake of the user's before an internal error, else who spoke first.

    When one rank fails, its neighbours fail a moment later with broken sockets; those are internal errors.
    """
    spoken = []
    for path in meeting_place.glob("last_words_*.json"):
        words = json.loads(path.read_text(encoding="utf-8"))
        spoken.append((words["exit_code"] == EXIT_INTERNAL, words["time"], words))
    if not spoken:
        return None
    words = min(spoken, key=lambda entry: entry[:2])[2]
    return words["message"], words["exit_code"]
