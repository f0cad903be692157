"""A process group between the trainer and its engines, made the way SGLang makes its own (0.5.12 to 0.5.23).

Members meet in a TCP store at the trainer, which is rank 0, under keys that begin with the group's name. The group is
built without torch's default group: it can fail, and be replaced, without touching the ranks' own groups.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

GroupBackend = Literal["gloo", "nccl"]
_DEVICE_OF: dict[str, str] = {"gloo": "cpu", "nccl": "cuda"}


class UpdateGroup:
    """One member's end of the group. Its calls block, at most for the timeout; a member that dies ends the
    others' calls at once, one that only hangs does not.
    """

    def __init__(
        self, store: Store, name: str, rank: int, size: int, backend: GroupBackend, timeout_seconds: float
    ) -> None:
        """Meets the others: returns when all are there, raises `RuntimeError` when one does not come in time."""
        for prefix in (name, f"{name}/", f"{_DEVICE_OF[backend]}/"):
            store = PrefixStore(prefix, store)
        self._store = store
        self._device = torch.device(_DEVICE_OF[backend])
        self._group: Any
        if backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_seconds))
        else:  # has not been run on a GPU yet
            self._group = dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())

    @property
    def device(self) -> torch.device:
        """Where tensors must be to travel."""
        return self._device

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Rank 0's contents reach all members, one tensor after the other. Raises `RuntimeError` on failure."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        group = self._group
        if group is None:
            raise RuntimeError("the group was abandoned")
        works = [group.broadcast([tensor], options) for tensor in tensors]
        try:
            while works:
                works.pop(0).wait()
        finally:
            # An error keeps this frame; what it held would keep the group, and the others would wait for it to close.
            works.clear()
            group = None

    def abandon(self) -> None:
        """Leave without a word; the others' calls fail as soon as no call of ours is running any more."""
        self._group = None


def open_store(address: str, timeout_seconds: float) -> tuple[TCPStore, int]:
    """The store of rank 0, which listens at this address alone, and its port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_seconds),
        master_listen_fd=listener.detach(),
    )
    return store, port


def reach_store(address: str, port: int, timeout_seconds: float) -> TCPStore:
    """The same store, seen by an engine."""
    timeout = timedelta(seconds=timeout_seconds)
    return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)


def address_towards(url: str) -> str:
    """This machine's address, as the server at ``url`` sees it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing: it only chooses the way out
        return str(probe.getsockname()[0])


def is_private(address: str) -> bool:
    """Whether the address is loopback or of a private network: weights travel in the clear."""
    found = ipaddress.ip_address(address.partition("%")[0])
    return found.is_private or found.is_loopback or found.is_link_local
