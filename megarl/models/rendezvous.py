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

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

# All ranks are started together: one that is not there after this is not coming.
JOIN_TIMEOUT = timedelta(minutes=5)
_LOCAL = "file://"
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Who this rank is, and where it meets the others: ``env://``, ``tcp://host:port``, or ``file://`` and the path of
    a file that does not exist yet.
    """

    rank: int
    size: int
    local_rank: int
    init_method: str


def join(rendezvous: Rendezvous, backend: str) -> None:
    """Become a rank of torch.distributed. Collective."""
    local = rendezvous.init_method.startswith(_LOCAL)
    meeting = Path(rendezvous.init_method.removeprefix(_LOCAL))
    dist.init_process_group(
        backend=backend,
        init_method=None if local else rendezvous.init_method,
        store=(_open(meeting) if rendezvous.rank == 0 else _find(meeting)) if local else None,
        rank=rendezvous.rank,
        world_size=rendezvous.size,
        timeout=JOIN_TIMEOUT,
    )


def _open(meeting: Path) -> Store:
    """Listen on a free loopback port and leave its number at the meeting place."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    # torch would listen on every interface; a socket of ours it takes as it is, and owns from then on
    store = TCPStore("127.0.0.1", port, None, True, JOIN_TIMEOUT, False, master_listen_fd=listener.detach())
    draft = meeting.with_name(f"{meeting.name}.draft")
    draft.write_text(str(port), encoding="ascii")
    draft.rename(meeting)
    return store


def _find(meeting: Path) -> Store:
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the first rank did not come to {meeting.name} in {JOIN_TIMEOUT}")
        time.sleep(_POLL_SECONDS)
    port = int(meeting.read_text(encoding="ascii"))
    return TCPStore("127.0.0.1", port, None, False, JOIN_TIMEOUT, False)
