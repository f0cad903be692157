"""The process of one tracker: follows a run's ledger and gives every step to its service.

``python -m megarl.trackers.follow RUN TRACKER``. Whoever started it holds the other ends of two pipes: a byte on stdin
says that there is more in the ledger, the end of stdin that nothing will follow; on stdout it says how it fares, one
JSON object per line. What the service's package prints goes to ``RUN/logs/tracker_NAME.log``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib
import json
import os
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, cast

from megarl.config.load import load_config
from megarl.core.errors import MegarlError
from megarl.core.secret import mask_urls, scrub
from megarl.trackers.backend import Backend, Refused, TrackedRun
from megarl.trackers.sinks import Sink
from megarl.trackers.tail import LedgerLine, LedgerRewound, LedgerTail

EXIT_DELIVERED, EXIT_NOT_DELIVERED = 0, 1
# How long a process may go on whose starter is gone.
SECONDS_ALONE = 10.0
_LINES_PER_REPORT = 100
_BACKENDS = {"tensorboard": "ToTensorBoard", "wandb": "ToWandb", "swanlab": "ToSwanlab"}


class Wakeups:
    """The pipe from the starter."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.ended = False

    def wait(self, seconds: float | None = None) -> bool:
        """Until there is more, or nothing will follow; False if neither happened in time."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return False
        self.ended = os.read(self._descriptor, 65536) == b""
        return True

    def pause(self, seconds: float) -> None:
        """Let time pass, unless nothing will follow."""
        deadline = time.monotonic() + seconds
        while not self.ended and (left := deadline - time.monotonic()) > 0:
            self.wait(left)


class Reports:
    """The pipe to the starter. A report that has no room, or no reader, is dropped: the next one says more."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def say(self, report: str, **facts: Any) -> None:
        line = json.dumps({"report": report, **facts}) + "\n"
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, line.encode())


def main(argv: list[str] | None = None) -> int:
    """Follow to the end; 0 if every step of the ledger was delivered."""
    parser = argparse.ArgumentParser(prog="megarl.trackers.follow")
    parser.add_argument("run", type=Path)
    parser.add_argument("tracker", choices=_BACKENDS)
    parser.add_argument("--retry-seconds", type=float, default=5.0)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(argv)
    wakeups, reports = _take_pipes(arguments.run / "logs" / f"tracker_{arguments.tracker}.log")
    _leave_when_alone()
    try:
        config = load_config(arguments.run / "resolved.yaml", arguments.overrides)
        run = TrackedRun(arguments.run, config, cast(Sink, arguments.tracker))
    except MegarlError as error:
        reports.say("refused", message=str(error))
        return EXIT_NOT_DELIVERED
    try:
        with _alone_with(run):
            return _serve(run, wakeups, reports, arguments.retry_seconds)
    except Exception as error:
        reports.say("failed", message=_told(error, run))
        sys.stderr.write(scrub(mask_urls(traceback.format_exc()), run.secrets))
        return EXIT_NOT_DELIVERED


def _serve(run: TrackedRun, wakeups: Wakeups, reports: Reports, retry_seconds: float) -> int:
    opened = _open(run, wakeups, reports, retry_seconds)
    if opened is None:
        return EXIT_NOT_DELIVERED
    backend, last_step = opened
    reports.say("ready")
    try:
        last_step = _deliver(run, backend, last_step, wakeups, reports)
    except LedgerRewound:  # another process follows what is written now
        return EXIT_NOT_DELIVERED
    backend.finish()
    reports.say("finished", step=last_step)
    return EXIT_DELIVERED


def _open(run: TrackedRun, wakeups: Wakeups, reports: Reports, retry_seconds: float) -> tuple[Backend, int] | None:
    """The service with an open run, and the last step that it has. Tries until it answers or nothing will follow."""
    while True:
        try:
            module = importlib.import_module(f"megarl.trackers.to_{run.sink}")
            backend: Backend = getattr(module, _BACKENDS[run.sink])(run)
            return backend, backend.start()
        except (Refused, MegarlError) as error:
            reports.say("refused", message=_told(error, run))
            return None
        except Exception as error:
            reports.say("unreachable", message=_told(error, run))
            sys.stderr.write(scrub(mask_urls(traceback.format_exc()), run.secrets))
        if wakeups.ended:
            return None
        wakeups.pause(retry_seconds)


def _deliver(run: TrackedRun, backend: Backend, last_step: int, wakeups: Wakeups, reports: Reports) -> int:
    """Every step of the ledger, once; the last one."""
    tail = LedgerTail(run.ledger)
    newest: LedgerLine | None = None
    while True:
        is_last_look = wakeups.ended  # asked before reading: what comes after the look would be missed
        for number, line in enumerate(tail.read(), start=1):
            if line.step > last_step:
                backend.log(line.step, line.time, run.spell(line), line.alerts)
                last_step, newest = line.step, line
            if number % _LINES_PER_REPORT == 0:
                reports.say("delivered", step=last_step)
        backend.settle(newest)
        reports.say("delivered", step=last_step)
        if is_last_look:
            return last_step
        wakeups.wait()


def _take_pipes(log: Path) -> tuple[Wakeups, Reports]:
    """Keep the pipes for this process alone: packages and their children see an empty stdin, and write to the log."""
    wakeups, reports = Wakeups(os.dup(0)), Reports(os.dup(1))
    log.parent.mkdir(exist_ok=True)
    with open(os.devnull, "rb") as nothing, open(log, "ab") as output:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    return wakeups, reports


def _leave_when_alone() -> None:
    """End this process a while after its starter, whatever the service is doing."""
    try:
        starter = os.pidfd_open(os.getppid())
    except ProcessLookupError:
        return

    def watch() -> None:
        select.select([starter], [], [])
        threading.Event().wait(SECONDS_ALONE)
        os._exit(EXIT_NOT_DELIVERED)

    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _alone_with(run: TrackedRun) -> Any:
    """Wait for an earlier process of this tracker, which may still be delivering."""
    run.own_directory.mkdir(exist_ok=True)
    with open(run.own_directory / f"{run.sink}.lock", "a", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _told(error: Exception, run: TrackedRun) -> str:
    """An error as one message that shows no secret."""
    text = str(error) if isinstance(error, (MegarlError, Refused)) else f"{type(error).__name__}: {error}"
    return scrub(mask_urls(text.strip()), run.secrets)


if __name__ == "__main__":
    _code = main()
    if _code != EXIT_DELIVERED:
        sys.stderr.flush()
        os._exit(_code)  # at a normal exit packages would try to finish what has just failed
    sys.exit(_code)
