"""Where the ranks of a run meet: under an address that their launcher gives, or at a socket that it opened for them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.core.errors import EngineError

# All ranks are started together: one that is not there after this is not coming.
JOIN_TIMEOUT = timedelta(minutes=5)
_MAX_NAMED = 10
_SOURCE_LINE = re.compile(r"\[/\S+:\d+\] ")  # of gloo
_TRY_AGAIN_SECONDS = 0.1
_TO_PART = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Who this rank is, and where it meets the others.

    ``meeting`` is ``tcp://HOST:PORT``, where the first rank will listen; ``inherited://HOST:PORT/FD``, where it listens
    already, because a parent opened the socket and left it to the first rank as descriptor FD; or
    ``agent://HOST:PORT/N``, where somebody else does, and the ranks meet for the N-th time.
    """

    rank: int
    size: int
    local_rank: int
    meeting: str
    # which of the devices that this process sees is its own; None: the one with its local rank's number
    device_index: int | None = None
    join_timeout: timedelta = JOIN_TIMEOUT


@dataclass(frozen=True, slots=True)
class Present:
    """A rank that came: its machine, the interface that gloo is told to use there, and a digest of what it is to do."""

    host: str
    interface: str
    digest: str


class Meeting:
    """A rank at the meeting: it says who it is, sees who else came, and connects to them.

    Until ranks are connected they leave each other notes (JSON) under names. Everything here ends when the time to join
    is over, or when the meeting is gone with the rank that holds it; then one `EngineError` says who is to blame.
    """

    def __init__(self, rendezvous: Rendezvous, digest: str = "") -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.size
        self.host = socket.gethostname()
        self.rendezvous = rendezvous
        self._deadline = time.monotonic() + rendezvous.join_timeout.total_seconds()
        self._store = reach(rendezvous)
        self.roll: list[Present] = []
        self._here = [f"here/{rank}" for rank in range(self.size)]
        own = Present(self.host, os.environ.get("GLOO_SOCKET_IFNAME", ""), digest)
        self.leave_note(self._here[self.rank], astuple(own))

    def leave_note(self, name: str, note: Any) -> None:
        """For whoever reads it."""
        try:
            self._store.set(name, json.dumps(note))
        except RuntimeError:
            raise self._gone() from None

    def read_notes(self, names: list[str]) -> list[Any]:
        """Wait for these notes. If they do not come, the ranks that did not come are named."""
        try:
            self._store.wait(names, timedelta(seconds=max(1.0, self._deadline - time.monotonic())))
            return [json.loads(note) for note in self._store.multi_get(names)]
        except RuntimeError:  # torch's time-out is one
            raise self._missing() from None

    def call_the_roll(self) -> list[Present]:
        """Wait for everybody. Without it torch would wait as well, and end with the name of a key. Collective."""
        self.roll = [Present(*note) for note in self.read_notes(self._here)]
        return self.roll

    def part(self) -> None:
        """Ranks that cannot go on leave together: the one that holds the meeting must not take it from the others."""
        read = [f"read/{rank}" for rank in range(self.size)]
        with contextlib.suppress(RuntimeError):
            self._store.set(read[self.rank], "")
            self._store.wait(read, _TO_PART)

    def connect(self, backend: str) -> None:
        """Become a rank of torch.distributed. Everybody is here. Collective."""
        try:
            dist.init_process_group(
                backend=backend, store=self._store, rank=self.rank, world_size=self.size, timeout=JOIN_TIMEOUT
            )
        except RuntimeError as error:
            places = [f"{one.interface or 'any interface'} of {one.host}" for one in self.roll]
            shown = ", ".join(places[:_MAX_NAMED])
            raise EngineError(
                "MRL-5306",
                f"rank {self.rank} on {self.host} met the others but cannot connect to them: "
                f"{_SOURCE_LINE.sub('', str(error).splitlines()[0])[:200]}.\n"
                f"Ranks 0 to {self.size - 1} use {shown}{', and more' * (len(places) > _MAX_NAMED)}, and all must "
                "reach each other there. Unset GLOO_SOCKET_IFNAME: megarl takes the interface that leads to rank 0. Or "
                "set it on every node to one that all nodes share, and open the firewall between them.",
            ) from None

    def _missing(self) -> EngineError:
        try:
            missing = [rank for rank, name in enumerate(self._here) if not self._store.check([name])]
            found = self._store.multi_get([name for rank, name in enumerate(self._here) if rank not in missing])
        except RuntimeError:
            return self._gone()
        present = sorted({json.loads(note)[0] for note in found})
        shown = ", ".join(str(rank) for rank in missing[:_MAX_NAMED])
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        return EngineError(
            "MRL-5304",
            f"of {self.size} ranks {len(missing)} did not come within "
            f"{self.rendezvous.join_timeout.total_seconds():.0f} s: rank {shown}{more}. Those here are on "
            f"{', '.join(present)}.\n"
            "Look at the output of the nodes that are missing: did their launcher start, and does it name the same "
            "master and the same number of nodes?",
        )

    def _gone(self) -> EngineError:
        place = urlsplit(self.rendezvous.meeting)
        return EngineError(
            "MRL-5302",
            f"rank {self.rank} on {self.host} lost the others while the ranks met: nobody is at "
            f"{place.hostname}:{place.port} any more.\nLook at the output of rank 0, and at its machine.",
        )


def join(rendezvous: Rendezvous, backend: str) -> None:
    """Meet all ranks and become one of them, with nothing to tell them before. Collective."""
    meeting = Meeting(rendezvous)
    meeting.call_the_roll()
    meeting.connect(backend)


def reach(rendezvous: Rendezvous) -> Store:
    """The store that all ranks share until they are connected."""
    place = urlsplit(rendezvous.meeting)
    timeout = rendezvous.join_timeout
    host, port = place.hostname, place.port
    assert host is not None and port is not None, "a launcher's record has both"
    is_server = rendezvous.rank == 0 and place.scheme != "agent"
    try:
        if is_server:
            listener = int(place.path[1:]) if place.scheme == "inherited" else _listen(host, port)
            # a socket of ours it takes as it is, and owns from then on
            store = TCPStore(host, port, None, True, timeout, False, master_listen_fd=listener)
        else:
            if place.scheme != "inherited":  # there somebody listens already
                _find(host, port, timeout.total_seconds())
            store = TCPStore(host, port, None, False, timeout, False)
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        who = "cannot listen" if is_server else "finds nobody"
        raise EngineError(
            "MRL-5303",
            f"rank {rendezvous.rank} on {socket.gethostname()} {who} at {host}:{port}: {reason}.\n"
            "All nodes need the same MASTER_ADDR, which the first node owns and the others reach, and a MASTER_PORT "
            "that is free there.",
        ) from None
    # what the ranks of an earlier attempt left with an agent is not ours
    return PrefixStore(f"attempt{place.path}", store) if place.scheme == "agent" else store


def _find(host: str, port: int, seconds: float) -> None:
    """Wait until somebody listens there: torch would as well, and write a page of its stack if nobody comes."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host, port), timeout=max(1.0, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_TRY_AGAIN_SECONDS)


def _listen(host: str, port: int) -> int:
    """A socket that listens at this address only: torch would listen on every interface."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=1024).detach()
