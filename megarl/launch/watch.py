"""Who is in trouble: what is known of every rank, and the one message that explains why a run has to end.

Nothing here reads a clock, a socket or a process: the local launcher and the guards tell it what they see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megarl.core.errors import EXIT_INTERNAL

EXIT_LOST = 69
# When one rank has ended, its neighbours fail a moment later; the one who explains it may be the slower to speak.
GRACE_SECONDS = 2.0
# While packages are imported and models are built, not all that takes long tells how far it is.
_START_FACTOR = 10
# The phase in which ranks meet and connect; who comes last has so much longer than others to connect.
JOIN = "join"
_SECONDS_TO_CONNECT = 5.0
_MAX_NAMED = 10
GO_ON = "Run the same command to go on from the last checkpoint."


@dataclass(slots=True)
class RankState:
    """One rank, as it last told and as its machine sees it. Times are of one clock: that of who keeps the state."""

    rank: int
    host: str
    # when its phase began, and when it last got on
    since: float
    progress: float
    phase: str = "start"
    step: int | None = None
    num_phases: int = 0
    # whether it waits for another rank
    waits: bool = False
    # since when it is stopped (SIGSTOP, a debugger); None: it runs
    stopped: float | None = None
    ended: float | None = None
    # how it ended, if its parent knows: an exit code, or minus a signal
    returncode: int | None = None
    # whether who started it had ended by then: the kernel ends a rank with its launcher
    has_lost_parent: bool = False
    is_done: bool = False
    # what it said before it failed: message, exit code
    words: tuple[str, int] | None = None
    # when it, or its guard, was heard of; None: its parent watches it
    heard: float | None = None
    is_lost: bool = False

    def take(self, message: dict[str, Any]) -> None:
        """One message of the rank itself."""
        at = float(message["at"])
        self.waits = bool(message.get("waits"))
        if not self.waits:
            self.progress = max(self.progress, at)
        if "step" in message:
            self.step = int(message["step"])
        if "phase" in message:
            self.phase, self.since = str(message["phase"])[:80], at
            self.num_phases += 1
        if "words" in message and self.words is None:
            self.words = str(message["words"]), int(message["exit_code"])
        self.is_done = self.is_done or bool(message.get("done"))

    def to_status(self, now: float) -> dict[str, Any]:
        """For a watch on another machine: ages instead of times, because clocks differ."""
        return {
            "since": now - self.since,
            "progress": now - self.progress,
            "phase": self.phase,
            "step": self.step,
            "num_phases": self.num_phases,
            "waits": self.waits,
            "stopped": None if self.stopped is None else now - self.stopped,
            "ended": None if self.ended is None else now - self.ended,
            "has_lost_parent": self.has_lost_parent,
            "is_done": self.is_done,
            "words": self.words,
        }

    def take_status(self, status: dict[str, Any], now: float) -> None:
        """The inverse of `to_status`."""
        self.heard = now
        self.since, self.progress = now - float(status["since"]), now - float(status["progress"])
        self.phase, self.num_phases = str(status["phase"])[:80], int(status["num_phases"])
        self.waits = bool(status["waits"])
        self.step = None if status["step"] is None else int(status["step"])
        self.stopped = None if status["stopped"] is None else now - float(status["stopped"])
        self.ended = None if status["ended"] is None else now - float(status["ended"])
        self.has_lost_parent = bool(status["has_lost_parent"])
        self.is_done = bool(status["is_done"])
        words = status["words"]
        self.words = None if words is None else (str(words[0]), int(words[1]))

    def place(self, now: float) -> str:
        """Where it was last seen."""
        step = "" if self.step is None else f" of step {self.step}"
        return f"{self.phase}{step} for {_seconds(now - self.since)}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the run ends, the exit code, and whether somebody hangs, so that stacks are of interest."""

    message: str
    exit_code: int
    is_hang: bool = False


@dataclass(slots=True)
class Watch:
    """All ranks of a run. ``hang_timeout`` None: ranks may take as long as they like."""

    ranks: dict[int, RankState]
    hang_timeout: float | None
    logs: str = "logs"
    # what to do when it has ended
    way_out: str = GO_ON
    # how long ranks may take to connect; None: nobody asks
    join_timeout: float | None = None
    # how many ranks know of this watch and may still report; those that it knows already if it is less
    size: int = 0
    _failed_at: float | None = field(default=None)

    @property
    def all_done(self) -> bool:
        """Whether every rank left as it should."""
        return all(rank.is_done for rank in self.ranks.values())

    def judge(self, now: float) -> Verdict | None:
        """Whether the run has to end now."""
        failed = [one for one in self.ranks.values() if one.ended is not None and not one.is_done]
        lost = [one for one in self.ranks.values() if one.is_lost and one.ended is None and not one.is_done]
        if failed or lost:
            self._failed_at = self._failed_at or now
            is_quiet = all(one.ended is not None or one.is_lost for one in self.ranks.values())
            is_quiet = is_quiet and len(self.ranks) >= self.size
            if is_quiet or now - self._failed_at >= GRACE_SECONDS:
                return self._explain(failed, lost, now)
            return None
        return self.find_late(now) or self._find_hang(now)

    def find_late(self, now: float) -> Verdict | None:
        """Ranks that met, or did not, and are still not connected. They know their time and leave by themselves, unless
        they are caught in code of others."""
        open_ranks = [one for one in self.ranks.values() if one.ended is None and not one.is_done]
        late = [one for one in open_ranks if one.phase == JOIN and now - one.since > self._seconds_to_join]
        if not late:
            return None
        names = ", ".join(f"rank {one.rank} on {one.host}" for one in late[:_MAX_NAMED])
        more = f" and {len(late) - _MAX_NAMED} more" if len(late) > _MAX_NAMED else ""
        return Verdict(
            f"MRL-5306 {names}{more} could not connect to the others within launch.join_timeout_seconds="
            f"{self.join_timeout:g}.\n"
            "The ranks must reach each other on the interface that gloo uses: unset GLOO_SOCKET_IFNAME, or set it on "
            "every node to one that all nodes share, and open the firewall between them. `megarl doctor` in place of "
            "`megarl train` measures that network.",
            EXIT_LOST,
        )

    @property
    def _seconds_to_join(self) -> float:
        return float("inf") if self.join_timeout is None else self.join_timeout + _SECONDS_TO_CONNECT

    def _explain(self, failed: list[RankState], lost: list[RankState], now: float) -> Verdict:
        """A mistake of the user's, else the first that ended without a word, else who spoke first of an internal error.

        When one rank fails its neighbours fail a moment later with broken sockets, which are internal errors.
        """
        in_order = sorted(failed, key=lambda one: (one.ended, one.rank))
        spoken = [one for one in in_order if one.words is not None]
        for one in spoken:
            if one.words is not None and one.words[1] != EXIT_INTERNAL:
                return Verdict(*one.words)
        silent = next((one for one in in_order if one.words is None and not _is_exit(one.returncode)), None)
        if silent is not None:
            return Verdict(self._silent(silent, now), EXIT_INTERNAL)
        if lost:
            return Verdict(self._lost(lost[0], "its connection was lost", now), EXIT_LOST)
        if spoken and spoken[0].words is not None:
            return Verdict(*spoken[0].words)
        return Verdict(self._silent(in_order[0], now), EXIT_INTERNAL)

    def _silent(self, one: RankState, now: float) -> str:
        if one.has_lost_parent:
            return (
                f"MRL-9004 the launcher's process on {one.host} was killed, and rank {one.rank} with it; it was in "
                f"{one.place(one.ended or now)}.\n{self.way_out}"
            )
        how = "died"
        if one.returncode is not None:
            how = f"ended with exit code {one.returncode}"
            if one.returncode < 0:
                how = f"was ended by signal {_signal(-one.returncode)}"
        return (
            f"MRL-9002 rank {one.rank} {how} on {one.host} and left no message; it was in "
            f"{one.place(one.ended or now)}. See {self.logs}.\n{self.way_out}"
        )

    def _lost(self, one: RankState, why: str, now: float) -> str:
        return (
            f"MRL-5302 rank {one.rank} on {one.host} is out of reach: {why}; it was in {one.place(now)}.\n"
            f"Look at that machine and its network. {self.way_out}"
        )

    def _find_hang(self, now: float) -> Verdict | None:
        """A rank that waits for others is not to blame: the run hangs when nobody gets on, or when one is stopped."""
        if self.hang_timeout is None:
            return None
        open_ranks = [one for one in self.ranks.values() if not one.is_done]
        for one in open_ranks:
            if one.heard is not None and now - one.heard > self.hang_timeout:
                return Verdict(self._lost(one, f"silent for {_seconds(now - one.heard)}", now), EXIT_LOST, True)
            if one.stopped is not None and now - one.stopped > self.hang_timeout:
                return Verdict(self._hang(one, f"is stopped since {_seconds(now - one.stopped)}", now), EXIT_LOST, True)
        is_starting = any(one.step is None for one in open_ranks)
        patience = self.hang_timeout * (_START_FACTOR if is_starting else 1)
        if not open_ranks or now - max(one.progress for one in open_ranks) <= patience:
            return None
        # every rank passes through the same phases: who is behind holds up the others, else who does not wait for
        # another one, else who stands still longest
        slowest = min(open_ranks, key=lambda one: (one.stopped is None, one.num_phases, one.waits, one.progress))
        what = "is stopped (SIGSTOP, or a debugger)" if slowest.stopped is not None else "does not get on"
        text = self._hang(slowest, f"{what}; no rank made progress for {patience:.0f} s", now)
        return Verdict(text, EXIT_LOST, True)

    def _hang(self, one: RankState, what: str, now: float) -> str:
        return (
            f"MRL-5301 rank {one.rank} on {one.host} {what}; it was in {one.place(now)}.\n"
            f"All ranks were ended; their stacks are in {self.logs}/stacks_rank_*.txt. "
            f"If it was only slow, raise launch.hang_timeout_seconds. {self.way_out}"
        )


def _is_exit(returncode: int | None) -> bool:
    return returncode is not None and returncode >= 0


def _signal(number: int) -> str:
    import signal

    return signal.Signals(number).name


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
