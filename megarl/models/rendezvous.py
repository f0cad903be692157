"""Where the ranks of a run meet: under an address that their launcher gives, or at a socket that it opened for them."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.core.errors import EngineError

# All ranks are started together: one that is not there after this is not coming.
JOIN_TIMEOUT = timedelta(minutes=5)
_MAX_NAMED = 10


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


def join(rendezvous: Rendezvous, backend: str) -> None:
    """Become a rank of torch.distributed. Who is missing when the time is over is named. Collective."""
    deadline = time.monotonic() + rendezvous.join_timeout.total_seconds()
    store = _reach(rendezvous)
    _call_the_roll(store, rendezvous, deadline)
    dist.init_process_group(
        backend=backend,
        store=store,
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=JOIN_TIMEOUT,
    )


def _reach(rendezvous: Rendezvous) -> Store:
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


def _call_the_roll(store: Store, rendezvous: Rendezvous, deadline: float) -> None:
    """Wait for everybody. Without it torch would wait as well, and end with the name of a key."""
    names = [f"here/{rank}" for rank in range(rendezvous.size)]
    store.set(names[rendezvous.rank], socket.gethostname())
    try:
        store.wait(names, timedelta(seconds=max(1.0, deadline - time.monotonic())))
    except RuntimeError:  # torch's time-out is one
        missing = [rank for rank, name in enumerate(names) if not store.check([name])]
        present = sorted({store.get(name).decode() for rank, name in enumerate(names) if rank not in missing})
        shown = ", ".join(str(rank) for rank in missing[:_MAX_NAMED])
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise EngineError(
            "MRL-5304",
            f"of {rendezvous.size} ranks {len(missing)} did not come within "
            f"{rendezvous.join_timeout.total_seconds():.0f} s: rank {shown}{more}. Those here are on "
            f"{', '.join(present)}.\n"
            "Look at the output of the nodes that are missing: did their launcher start, and does it name the same "
            "master and the same number of nodes?",
        ) from None


def _listen(host: str, port: int) -> int:
    """A socket that listens at this address only: torch would listen on every interface."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family, backlog=1024).detach()
