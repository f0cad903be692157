"""The guard: a small process beside every rank that torchrun, Slurm or Ray started.

It knows where its rank was even when the rank was killed, sees when the rank is stopped, and can end it: a thread of
the rank could do none of this. The guard of rank 0 is the watch: the others report to it every second over TCP. When a
rank fails, hangs or is out of reach, the watch says so once, on rank 0's terminal, and all guards end their ranks.
Guards keep nothing alive and never outlive their rank for long. They load neither torch nor anything else that is slow.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from megarl.core.errors import EXIT_INTERNAL
from megarl.launch.kept import KeptRank, end_ranks
from megarl.launch.line import LINE, RankLine, new_line
from megarl.launch.watch import EXIT_LOST, RankState, Verdict, Watch

if TYPE_CHECKING:
    from megarl.launch.rendezvous import RankRecord

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.25
# A guard whose rank has ended waits so long to hear why.
_SECONDS_AFTER_THE_END = 8.0
# The watch waits so long, once, for a peer whose machine takes no more: it has others to tell.
_SECONDS_TO_TELL = 1.0
_MAX_LINE = 1 << 20
# They are for the rank. A guard leaves by itself when its rank has left.
_REQUESTS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def start_guard(record: RankRecord, address: str, hang_timeout: float | None, join_timeout: float) -> RankLine:
    """Start the guard of this process, which is this rank. The driver's listens at ``address``."""
    own, guards = new_line()
    settings = {
        "pid": os.getpid(),
        "rank": record.rank,
        "size": record.size,
        "address": address,
        "hang_timeout": hang_timeout,
        "join_timeout": join_timeout,
        "speaks_alone": record.local_rank == 0,
    }
    # a session of its own, and deaf: what ends the rank, or what Slurm sends to every process of a job, must not end
    # who has to tell of it
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, _REQUESTS)
    try:
        subprocess.Popen(
            [sys.executable, "-m", "megarl.launch.guard", json.dumps(settings)],
            env={**os.environ, LINE: str(guards.fileno())},
            pass_fds=[guards.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
    guards.close()
    return RankLine(own)


class _Peer:
    """One TCP connection: lines of JSON, of bounded length."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.rank: int | None = None
        self.is_open = True
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            data = self.connection.recv(65536)
        except OSError:
            data = b""
        self._rest += data
        if not data or len(self._rest) > _MAX_LINE:
            self.is_open = False
            return
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message

    def write(self, message: dict[str, Any]) -> None:
        """Whoever did not take all of a message gets no other: each would be waited for."""
        if not self.is_open:
            return
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_open = False


class Guard:
    """The guard of one rank; that of rank 0 is also the watch over all."""

    def __init__(self, kept: KeptRank, settings: dict[str, Any]) -> None:
        self._kept = kept
        self._size = int(settings["size"])
        self._hang_timeout: float | None = settings["hang_timeout"]
        self._speaks_alone = bool(settings["speaks_alone"])
        self._is_watch = kept.state.rank == 0
        self._watch = Watch({kept.state.rank: kept.state}, self._hang_timeout, join_timeout=settings["join_timeout"])
        self._password = os.urandom(16).hex()
        self._listener = socket.create_server((settings["address"], 0)) if self._is_watch else None
        self._peers: list[_Peer] = []
        self._link: _Peer | None = None
        # whether the watch said that all is over
        self._is_told = False
        self._heard = time.monotonic()
        self._beat = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(kept.line, selectors.EVENT_READ, "rank")
        self._selector.register(kept.process, selectors.EVENT_READ, "rank")
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ, "listener")
            host, port = self._listener.getsockname()[:2]
            kept.line.send(json.dumps({"listening": [host, port, self._password]}).encode())

    @property
    def _members(self) -> list[_Peer]:
        """Connections of guards; anybody else may connect, but is not spoken to."""
        return [peer for peer in self._peers if peer.rank is not None]

    def run(self) -> None:
        """Until the rank and its run are over."""
        while True:
            for key, _ in self._selector.select(_POLL_SECONDS):
                self._take(key)
            now = time.monotonic()
            self._kept.look(now)
            if self._kept.state.ended is not None:
                for closed in (self._kept.line, self._kept.process):
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(closed)
            verdict = self._judge(now)
            if verdict is not None:
                self._carry_out(verdict)
                return
            if self._is_over(now):
                return
            if now - self._beat > _BEAT_SECONDS:
                self._send_beats(now)

    def _take(self, key: selectors.SelectorKey) -> None:
        if key.data == "rank":
            for message in self._kept.drain():
                if "hub" in message and self._is_watch:
                    self._watch.size = self._size  # from now on the others can find it
                elif "hub" in message and self._link is None:
                    self._connect(*message["hub"])
                if "logs" in message:
                    self._watch.logs = str(message["logs"])
        elif key.data == "listener" and self._listener is not None:
            connection, _ = self._listener.accept()
            connection.settimeout(_SECONDS_TO_TELL)
            peer = _Peer(connection)
            self._peers.append(peer)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        elif isinstance(key.data, _Peer):
            for message in key.data.read():
                self._take_from(key.data, message)
            if not key.data.is_open:
                self._forget(key.data)

    def _take_from(self, peer: _Peer, message: dict[str, Any]) -> None:
        now = time.monotonic()
        self._heard = now
        if not self._is_watch:
            if "verdict" in message:
                self._carry_out(Verdict(*message["verdict"]))
                sys.exit(0)
            self._is_told = bool(message.get("over"))
        elif peer.rank is None:
            if not hmac.compare_digest(str(message.get("password")), self._password):
                self._forget(peer)
                return
            peer.rank = int(message["rank"])
            self._watch.ranks[peer.rank] = RankState(peer.rank, str(message["host"])[:80], now, now, heard=now)
        elif "status" in message:
            self._watch.ranks[peer.rank].take_status(message["status"], now)

    def _forget(self, peer: _Peer) -> None:
        """A connection is over; who did not say goodbye is lost."""
        if peer.connection.fileno() < 0:
            return
        self._selector.unregister(peer.connection)
        peer.connection.close()
        peer.is_open = False
        if peer in self._peers:
            self._peers.remove(peer)
        if peer.rank is not None:
            self._watch.ranks[peer.rank].is_lost = True

    def _connect(self, host: str, port: int, password: str) -> None:
        self._heard = time.monotonic()
        try:
            connection = socket.create_connection((host, port), timeout=10.0)
        except OSError:  # the driver ended before we could come
            self._link = _Peer(socket.socket())
            self._link.is_open = False
            return
        connection.settimeout(5.0)
        self._link = _Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, self._link)
        own = self._kept.state
        self._link.write({"password": password, "rank": own.rank, "host": own.host})
        self._send_beats(self._heard)

    def _send_beats(self, now: float) -> None:
        self._beat = now
        self._tell_all({"beat": now})
        if self._link is not None:
            self._link.write({"status": self._kept.state.to_status(now)})

    def _tell_all(self, message: dict[str, Any]) -> None:
        for peer in self._members:
            peer.write(message)

    def _judge(self, now: float) -> Verdict | None:
        own = self._kept.state
        if self._is_watch:
            return self._watch.judge(now)
        if self._link is None:  # not connected yet
            failed = own.ended is not None and not own.is_done
            return self._watch.judge(now) if failed else self._watch.find_late(now)
        if own.ended is not None and now - own.ended < _POLL_SECONDS:
            self._send_beats(now)
        silence = self._hang_timeout is not None and now - self._heard > self._hang_timeout
        if own.is_done or (self._link.is_open and not silence):
            return None
        why = f"silent for {now - self._heard:.0f} s" if silence else "its connection was lost"
        text = f"MRL-5302 rank 0 is out of reach of rank {own.rank} on {own.host}: {why}. This rank was in "
        text += f"{own.place(now)}.\nLook at rank 0's machine. Run the same command to go on from the last checkpoint."
        self._link = None  # from here on this guard is on its own
        return Verdict(text, EXIT_LOST, True)

    def _is_over(self, now: float) -> bool:
        own = self._kept.state
        if self._is_watch and len(self._watch.ranks) == self._size and self._watch.all_done and own.ended is not None:
            self._tell_all({"over": True})
            return True
        if self._is_watch and own.is_done and self._members:
            return False
        is_alone = self._link is None or not self._link.is_open or self._is_told
        return own.ended is not None and ((own.is_done and is_alone) or now - own.ended > _SECONDS_AFTER_THE_END)

    def _carry_out(self, verdict: Verdict) -> None:
        own = self._kept.state
        is_alone = self._link is None and not self._is_watch
        self._tell_all({"verdict": [verdict.message, verdict.exit_code, verdict.is_hang]})
        # first of all: Slurm kills what is left of a task as soon as its rank has ended
        if self._is_watch or (is_alone and (self._speaks_alone or verdict.exit_code == EXIT_INTERNAL)):
            with contextlib.suppress(OSError):
                sys.stderr.write(f"{verdict.message}\n")
                sys.stderr.flush()
        if own.ended is None:
            end_ranks([self._kept], verdict.exit_code, with_stacks=verdict.is_hang)
        deadline = time.monotonic() + 2.0
        while self._members and time.monotonic() < deadline:  # a connection that is cut at once may lose the verdict
            for key, _ in self._selector.select(_POLL_SECONDS):
                if isinstance(key.data, _Peer):
                    list(key.data.read())
                    if not key.data.is_open:
                        self._forget(key.data)


def main() -> None:
    """``python -m megarl.launch.guard SETTINGS``, started by a rank."""
    settings = json.loads(sys.argv[1])
    line = socket.socket(fileno=int(os.environ.pop(LINE)))
    now = time.monotonic()
    state = RankState(int(settings["rank"]), socket.gethostname(), now, now)
    try:
        kept = KeptRank(state, int(settings["pid"]), line)
    except ProcessLookupError:
        return  # the rank is already gone
    Guard(kept, settings).run()


if __name__ == "__main__":
    main()
