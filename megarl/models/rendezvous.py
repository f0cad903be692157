"""Where the ranks of a run meet: under an address that a launcher gives, or in a directory of this machine.

torch's own meeting in a file polls it for every process group, which takes minutes on a busy machine; ours only uses
the directory to tell the others on which loopback port the first rank listens.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megarl.core.errors import EngineError

# All ranks are started together: one that is not there after this is not coming.
JOIN_TIMEOUT = timedelta(minutes=5)
_POLL_SECONDS = 0.01
_MAX_NAMED = 10


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Who this rank is, and where it meets the others.

    ``meeting`` is ``file://`` and the path of a file that does not exist yet, ``tcp://HOST:PORT``, where the first rank
    will listen, or ``agent://HOST:PORT/N``, where somebody already does, and the ranks meet for the N-th time.
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
    if place.scheme == "file":
        return _open(Path(place.path)) if rendezvous.rank == 0 else _find(Path(place.path), timeout)
    host, port = place.hostname, place.port
    assert host is not None and port is not None, "a launcher's record has both"
    try:
        if place.scheme == "tcp" and rendezvous.rank == 0:
            return PrefixStore("attempt", _listen(host, port, timeout))
        # what the ranks of an earlier attempt left there is not ours
        return PrefixStore(f"attempt{place.path}", TCPStore(host, port, None, False, timeout, False))
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120]
        who = "cannot listen" if rendezvous.rank == 0 and place.scheme == "tcp" else "finds nobody"
        raise EngineError(
            "MRL-5303",
            f"rank {rendezvous.rank} on {socket.gethostname()} {who} at {host}:{port}: {reason}.\n"
            "All nodes need the same MASTER_ADDR, which the first node owns and the others reach, and a MASTER_PORT "
            "that is free there.",
        ) from None


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


def _listen(host: str, port: int, timeout: timedelta) -> Store:
    """Serve the store at this address only: torch would listen on every interface."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=1024)
    # a socket of ours it takes as it is, and owns from then on
    return TCPStore(host, listener.getsockname()[1], None, True, timeout, False, master_listen_fd=listener.detach())


def _open(meeting: Path) -> Store:
    """Listen on a free loopback port and leave its number at the meeting place."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore("127.0.0.1", port, None, True, JOIN_TIMEOUT, False, master_listen_fd=listener.detach())
    draft = meeting.with_name(f"{meeting.name}.draft")
    draft.write_text(str(port), encoding="ascii")
    draft.rename(meeting)
    return store


def _find(meeting: Path, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank did not come to {meeting.name} in {timeout}")
        time.sleep(_POLL_SECONDS)
    port = int(meeting.read_text(encoding="ascii"))
    return TCPStore("127.0.0.1", port, None, False, JOIN_TIMEOUT, False)
