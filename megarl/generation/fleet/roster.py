"""The states of all servers: what happened decides, and every change is said once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.protocols import RemoteEngine, ServerProcesses
from megarl.generation.fleet.pulse import Pulse
from megarl.generation.fleet.server import Server, State
from megarl.generation.fleet.settings import (
    FAILED_PUSHES_TO_DEATH,
    FAILURES_TO_DEATH,
    PROBES_TO_DEATH,
    PROBES_TO_RETIREMENT,
    FleetSettings,
)

# faults that say that an answer came, and was not to be trusted
BAD_ANSWERS = ("garbled", "rejected", "stale")


class Roster:
    """All servers. Only the event loop's thread may call it; no call waits.

    ``on_leave`` is called when a server loses its weights or its life: nothing that it still answers may count;
    ``on_change`` after every change of a state.
    """

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        settings: FleetSettings,
        processes: ServerProcesses | None,
        say: Callable[[str], None],
    ) -> None:
        self.servers = [Server(engine) for engine in engines]
        self.on_leave: Callable[[Server], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        self.changed = Pulse()
        self.tally: Counter[str] = Counter()
        # a mistake of ours while nobody listened
        self.error: Exception | None = None
        self._settings = settings
        self._processes = processes
        self._say = say
        # of the last push that reached anybody
        self._latest: int | None = None

    # -- questions

    def find(self, url: str) -> Server:
        """The server at this address."""
        return next(server for server in self.servers if server.url == url)

    @property
    def num_healthy(self) -> int:
        """Servers that serve."""
        return sum(server.state == "healthy" for server in self.servers)

    @property
    def needs_push(self) -> bool:
        """Whether a push would bring somebody into service."""
        return any(
            server.state == "stale" or (server.state == "healthy" and server.version != self._latest)
            for server in self.servers
        )

    def restarts(self, server: Server) -> bool:
        """Whether it is dead and will be started again."""
        return server.state == "dead" and self._processes is not None

    def is_gone(self, server: Server) -> bool:
        """Whether its process has ended."""
        return self._processes is not None and not self._processes.is_running(server.url)

    def require_floor(self) -> None:
        """Raise if too few servers serve or can be brought back."""
        if self.error is not None:
            raise self.error
        num_left = sum(server.is_up or self.restarts(server) for server in self.servers)
        if num_left < self._settings.min_servers:
            raise EngineError(
                "MRL-5160",
                f"{num_left} of {len(self.servers)} generation servers are left; generation.min_servers is "
                f"{self._settings.min_servers}.\nWhat became of them:\n{self.describe()}\n"
                "Look at the servers' logs; the same command resumes from the last checkpoint.",
            )

    def describe(self) -> str:
        """One line for each server."""
        return "\n".join(f"  {server.describe(self._settings.max_restarts)}" for server in self.servers)

    # -- requests

    def served(self, server: Server) -> None:
        """It answered a request well."""
        server.num_served += 1
        server.failures_in_a_row = server.failed_probes = 0

    def failed(self, server: Server, fault: EngineFault, number: int) -> None:
        """The ``number``-th request that it was sent failed."""
        server.num_failed += 1
        server.last_fault = str(fault)
        self.tally["engine/num_rejected"] += fault.kind in BAD_ANSWERS
        if server.state not in ("healthy", "suspect"):
            return
        if self.is_gone(server):
            self.died(server, "its process ended")
            return
        if number > server.last_failed:
            server.failures_in_a_row += 1
            server.last_failed = server.num_sent
        if server.failures_in_a_row >= FAILURES_TO_DEATH:
            self.died(server, f"{fault.kind} requests", f"{FAILURES_TO_DEATH} requests failed in a row ({fault})")
        elif fault.kind == "stale":
            self._move(server, "stale", fault.kind, fault.reason, "it serves again after the next push")
        elif server.state == "healthy":
            self._move(server, "suspect", fault.kind, fault.reason, "it gets no requests until a probe finds it well")

    # -- probes

    def probe_passed(self, server: Server, version: int | None) -> None:
        """It answered a probe. A suspect also said the version of its weights."""
        server.failed_probes = 0
        self.changed.beat()
        if server.state == "suspect":
            if version != server.version:
                why = f"it reports weights of version {version} instead of {server.version}"
                self._move(server, "stale", "restarted unseen", why, "it serves again after the next push")
            elif version != self._latest:
                why = f"it missed the push of version {self._latest}"
                self._move(server, "stale", "missed push", why, "it serves again after the next push")
            else:
                self._move(server, "healthy", "good probe", "it answers, with the right weights", "it serves again")
        elif server.state == "dead":
            if server.num_restarts >= self._settings.max_restarts:
                why = f"it came back {server.num_restarts} times before"
                self._move(server, "retired", "unstable", why, "it is not used any more")
            else:
                server.num_restarts += 1
                self.came_back(server)

    def probe_failed(self, server: Server) -> None:
        """It did not answer a probe."""
        server.failed_probes += 1
        if server.state == "healthy":
            server.last_fault = "timeout: it did not answer a health probe"
            self._move(server, "suspect", "failed probe", "it did not answer", "it gets no requests until it does")
        elif server.is_up and server.failed_probes >= PROBES_TO_DEATH:
            self.died(server, "failed probes", f"it did not answer {server.failed_probes} probes in a row")
        elif server.state == "dead" and server.failed_probes >= PROBES_TO_RETIREMENT:
            self._move(server, "retired", "failed probes", "it stays away", "it is not used any more")

    # -- pushes

    def targets(self) -> list[str]:
        """Whom to push weights to."""
        pushable = [server for server in self.servers if server.is_pushable]
        for server in pushable:
            server.offered_life = server.life
        return [server.url for server in pushable]

    def pushed(self, url: str, version: int, problem: str | None) -> None:
        """See `PushTargets.pushed`. A push to an earlier life of the server does not count."""
        server = self.find(url)
        if not server.is_up or server.offered_life != server.life:
            return
        if self.is_gone(server):
            self.died(server, "its process ended")
        elif problem is None:
            self._latest = version
            server.failed_pushes = server.failed_probes = 0
            if server.version != version:
                server.verified.append(version)
                server.revision += 1
            if server.is_told:
                why = f"its weights are those of version {version}"
                self._move(server, "healthy", f"push {server.life}", why, "it serves again")
            elif server.state != "healthy":
                self._enter(server, "healthy")
        else:
            server.last_fault = problem
            server.failed_pushes += 1
            if server.failed_pushes >= FAILED_PUSHES_TO_DEATH:
                self.died(server, "failed pushes", f"{FAILED_PUSHES_TO_DEATH} pushes failed in a row ({problem})")
            else:
                self._move(server, "stale", "failed push", problem, "it serves nothing until a push succeeds")

    def lost_weights(self, server: Server) -> None:
        """It gave its weights back, as it was asked to: nothing to talk about."""
        if server.state in ("healthy", "suspect"):
            self._enter(server, "stale")

    # -- life

    def misbehaved(self, server: Server, what: str, fault: str, *, is_fatal: bool) -> None:
        """It failed to do ``what`` (pause, release its memory) when it was told to."""
        server.num_failed += 1
        server.last_fault = fault
        if not server.is_up:
            return
        if self.is_gone(server):
            self.died(server, "its process ended")
        elif is_fatal:
            self.died(server, f"cannot {what}", f"it did not {what} ({fault})")
        else:
            why = f"it did not {what} ({fault})"
            self._move(server, "stale", f"cannot {what}", why, "it serves nothing until a push succeeds")

    def died(self, server: Server, cause: str, why: str | None = None) -> None:
        """It is of no use any more. Started servers are started again, others may come back by themselves."""
        self.tally["engine/num_lost"] += server.is_up
        server.life += 1
        server.released.clear()
        server.failed_probes = server.failed_pushes = server.failures_in_a_row = 0
        limit = self._settings.max_restarts
        if self._processes is None:
            self._move(server, "dead", cause, why or cause, "megarl did not start it and waits for it to come back")
        elif server.num_restarts < limit:
            then = f"it is started again ({server.num_restarts + 1} of {limit})"
            self._move(server, "dead", f"{cause}, restart {server.num_restarts + 1}", why or cause, then)
        else:
            then = f"it was started again {limit} times already and is not used any more"
            self._move(server, "retired", cause, why or cause, then)

    def restarting(self, server: Server) -> None:
        """It is being started again."""
        server.num_restarts += 1
        self.tally["engine/num_restarts"] += 1

    def came_back(self, server: Server) -> None:
        """It is up again, with unknown weights."""
        server.last_failed = server.num_sent
        self._move(server, "stale", f"comeback {server.num_restarts}", "it is up again", "it waits for the next push")

    # -- changes

    def _move(self, server: Server, to: State, cause: str, why: str, then: str) -> None:
        change = f"{server.state} -> {to}" if server.state != to else f"still {to}"
        self._enter(server, to)
        server.is_told = to != "healthy"
        server.causes[to, cause] += 1
        count = server.causes[to, cause]
        # The first of a kind is said; then the 10th, the 100th, ...: `describe` has the count.
        if count == 1 or str(count).rstrip("0") == "1":
            times = f" ({count} times by now)" if count > 1 else ""
            self._say(f"generation server {server.url}: {change}{times}: {why}; {then}.")

    def _enter(self, server: Server, to: State) -> None:
        server.state = to
        server.revision += 1
        server.alarm.set()
        if to not in ("healthy", "suspect"):
            server.verified.clear()
            self.on_leave(server)
        self.changed.beat()
        self.on_change()
