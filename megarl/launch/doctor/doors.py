"""Do ranks reach each other at all? Asked with plain sockets, because gloo waits for minutes where they do not."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil

from megarl.launch.network import own_address

Address = tuple[str, int]

KNOCK_SECONDS = 5.0


@contextmanager
def open_door(interface: str | None, master_address: str) -> Iterator[Address | None]:
    """Where other ranks may knock: a port of the interface that gloo will use. None if it has no address."""
    own = psutil.net_if_addrs().get(interface or "", [])
    # the order in which gloo would take them
    addresses = [one.address for family in (socket.AF_INET, socket.AF_INET6) for one in own if one.family == family]
    address = addresses[0] if addresses else own_address(master_address) if interface is None else None
    try:
        family = socket.AF_INET6 if address and ":" in address else socket.AF_INET
        # nobody has to answer the door: the kernel lets in who comes
        listener = socket.create_server((address, 0), family=family, backlog=1024) if address else None
    except OSError:
        listener = None
    if listener is None:
        yield None
        return
    with listener:
        yield (str(listener.getsockname()[0]), int(listener.getsockname()[1]))


def knock(doors: dict[int, Address | None]) -> dict[int, str]:
    """The ranks that are not reached, and why."""
    if not doors:
        return {}
    with ThreadPoolExecutor(len(doors)) as pool:
        answers = pool.map(_why_not, doors.values())
        return {rank: why for rank, why in zip(doors, answers, strict=True) if why}


def _why_not(door: Address | None) -> str:
    if door is None:
        return "its interface has no address"
    try:
        with socket.create_connection(door, KNOCK_SECONDS):
            return ""
    except OSError as error:
        return f"{door[0]}: {error.strerror or 'timed out'}"
