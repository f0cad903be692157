"""The trackers of a run that have processes of their own. They follow the ledger; the run never waits for them.

Only the start may fail the run, and only for what the user can mend. Afterwards a tracker that dies or hangs costs a
warning: its process is started again, goes on where the service is, and in the end the ledger has everything.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.core.errors import ConfigError
from megarl.trackers.follow import EXIT_DELIVERED
from megarl.trackers.follower import FollowerProcess, Report

logger = logging.getLogger(__name__)

_MAX_RESTARTS = 20


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is waited for what, in seconds."""

    # for the first word of a process; then the run starts without it
    to_be_ready: float = 60.0
    # for any word of a process that has steps to deliver; then it is started again
    to_speak: float = 120.0
    # for any word of a process at the end of the run; then it is ended
    to_leave: float = 10.0
    # between attempts to reach a service
    between_attempts: float = 5.0


class _Follower:
    """One tracker over all its processes."""

    def __init__(self, run: Path, tracker: str, patience: Patience, overrides: Sequence[str]) -> None:
        self.tracker = tracker
        self.refusal = ""
        self.has_spoken = False
        self.delivered = -1
        self._run = run
        self._patience = patience
        self._overrides = overrides
        self._recorded = -1
        self._num_restarts = 0
        self._had_last_chance = False
        self._told: set[str] = set()
        self._start()

    @property
    def log(self) -> Path:
        """What its processes and its package wrote."""
        return self._run / "logs" / f"tracker_{self.tracker}.log"

    def _start(self) -> None:
        self.process = FollowerProcess(self._run, self.tracker, self._patience.between_attempts, self._overrides)
        self.last_word = time.monotonic()

    @property
    def is_finished(self) -> bool:
        """Whether its process has delivered everything and left."""
        return self.process.exit_code == EXIT_DELIVERED

    def hear(self) -> None:
        """Take in what the process has said."""
        for report in self.process.read():
            self.last_word = time.monotonic()
            self.has_spoken = True
            self._take(report)

    def _take(self, report: Report) -> None:
        self.delivered = max(self.delivered, report.step)
        if report.kind == "refused":
            self.refusal = report.message
        elif report.kind in ("unreachable", "failed"):
            self.warn(f"{report.kind}: {report.message}. The run goes on; the ledger has everything.")

    def step_recorded(self, step: int) -> None:
        """There is one more step in the ledger."""
        self.hear()
        if self.delivered >= self._recorded:
            self.last_word = time.monotonic()  # it had nothing to say since
        self._recorded = step
        silence = time.monotonic() - self.last_word
        if self.process.exit_code is not None:
            self.restart("its process ended")
        elif silence > self._patience.to_speak:
            self.restart(f"it said nothing for {self._patience.to_speak:g} seconds")
        self.process.wake()

    def restart(self, reason: str) -> None:
        """A new process, not too soon after the last; none if there were too many, or if the service refuses."""
        pause = min(60.0, self._patience.between_attempts * 2.0**self._num_restarts) if self._num_restarts else 0.0
        if self.refusal or self._num_restarts >= _MAX_RESTARTS or time.monotonic() - self.last_word < pause:
            return
        self._num_restarts += 1
        self.warn(f"{reason}; it is started again.")
        self.process.end()
        self._start()

    def end_of_run(self) -> None:
        """Nothing will follow."""
        self.process.announce_end()
        self.last_word = time.monotonic()

    def is_working(self) -> bool:
        """After the end of the run: whether to wait on. A process that failed is started once more."""
        code = self.process.exit_code
        if code is None:
            return time.monotonic() - self.last_word < self._patience.to_leave
        if code == EXIT_DELIVERED or self.refusal or self._had_last_chance:
            return False
        self._had_last_chance = True
        self.process.end()
        self._start()
        self.end_of_run()
        return True

    def warn(self, text: str) -> None:
        """Say it once."""
        if text not in self._told:
            self._told.add(text)
            logger.warning("Tracker %s: %s", self.tracker, text)

    def conclude(self) -> None:
        """End the process if it is still there, and say what is missing."""
        code = self.process.exit_code
        self.process.end()
        if code == EXIT_DELIVERED:
            return
        why = self.refusal or ("it did not finish in time" if code is None else "it could not deliver")
        logger.warning(
            "Tracker %s has only the steps up to %d of %d for certain: %s (see %s).\n"
            "The ledger has them all. To deliver them: megarl track %s",
            self.tracker,
            self.delivered,
            self._recorded,
            why,
            self.log,
            self._run,
        )


class Followers:
    """The processes of all such trackers of a run."""

    def __init__(
        self,
        run: Path,
        trackers: Sequence[str],
        patience: Patience | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        """Start them; ``overrides`` are settings that replace those of the run."""
        self._patience = patience or Patience()
        self._all = [_Follower(run, tracker, self._patience, overrides) for tracker in trackers]

    def await_ready(self) -> None:
        """Wait for the first word of each. Raises a `ConfigError` if one of them does not accept the run."""
        deadline = time.monotonic() + self._patience.to_be_ready
        waiting = list(self._all)
        while waiting and (left := deadline - time.monotonic()) > 0:
            self._listen(waiting, left)
            for follower in waiting:
                if follower.refusal or (follower.process.exit_code is not None and not follower.has_spoken):
                    self._give_up_on(follower)
            waiting = [follower for follower in waiting if not follower.has_spoken]
        for follower in waiting:
            follower.warn(
                f"is not ready after {self._patience.to_be_ready:g} seconds. The run goes on without waiting."
            )

    def log(self, _: Mapping[str, float], step: int) -> None:
        """A step is in the ledger. Never blocks and never raises."""
        for follower in self._all:
            try:
                follower.step_recorded(step)
            except Exception as error:  # such as no memory for a new process; it is not worth a run
                follower.warn(f"cannot be looked after: {type(error).__name__}: {error}.")

    def finish(self) -> None:
        """Let them deliver the rest. Whoever says nothing for a while is ended."""
        try:
            self._finish()
        except Exception as error:
            logger.warning("Trackers could not be finished: %s: %s.", type(error).__name__, error)

    @property
    def all_delivered(self) -> bool:
        """After the end: whether every tracker has everything."""
        return all(follower.is_finished for follower in self._all)

    def _finish(self) -> None:
        for follower in self._all:
            follower.end_of_run()
        waiting = list(self._all)
        while waiting:
            self._listen(waiting, self._patience.to_leave)
            waiting = [follower for follower in waiting if follower.is_working()]
        for follower in self._all:
            follower.hear()
            follower.conclude()

    def _listen(self, followers: Sequence[_Follower], seconds: float) -> None:
        """Wait until one of them says something or is gone."""
        select.select([follower.process.reports for follower in followers], [], [], seconds)
        for follower in followers:
            follower.hear()

    def _give_up_on(self, refused: _Follower) -> None:
        for follower in self._all:
            follower.process.end()
        message = refused.refusal or f"its process ended at once; see {refused.log}"
        raise ConfigError("MRL-1016", f"track_with: {refused.tracker} does not work: {message}")
