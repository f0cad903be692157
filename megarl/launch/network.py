"""This machine on the network of the run: which interface and address lead to the first rank."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping

import psutil

from megarl.core.errors import ConfigError
from megarl.launch.rendezvous import RankRecord

LOOPBACK = "127.0.0.1"
_DISCARD = 9  # a port to aim at; nothing is sent


def choose_interface(record: RankRecord, environment: Mapping[str, str]) -> str | None:
    """What GLOO_SOCKET_IFNAME should be. None: it is set, or there is nothing better than gloo's own guess.

    One node keeps to itself. Several use the interface that leads to the first rank; what the user chose for NCCL is
    good for gloo as well.
    """
    if environment.get("GLOO_SOCKET_IFNAME"):
        return None
    if record.num_nodes == 1:
        return "lo" if "lo" in psutil.net_if_addrs() else None
    wanted = environment.get("NCCL_SOCKET_IFNAME", "").removeprefix("=")
    if wanted in psutil.net_if_addrs():
        return wanted
    return interface_of(own_address(record.master_address))


def own_address(master_address: str) -> str:
    """The address of this machine that the first rank's machine sees."""
    family, _, _, _, target = resolve(master_address)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise ConfigError(
                "MRL-1606",
                f"there is no way from {socket.gethostname()} to MASTER_ADDR={master_address}: {error.strerror}.\n"
                "Set MASTER_ADDR to an address of the first node on a network that all nodes share.",
            ) from None
        found = str(probe.getsockname()[0])
    if ipaddress.ip_address(found.partition("%")[0]).is_loopback and not _says_loopback(master_address):
        # Debian's /etc/hosts gives a machine's own name a loopback address, under which nobody else finds it.
        return _outer_address() or found
    return found


def resolve(master_address: str) -> tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int]]:
    """The first rank's address, or one message that says that there is none."""
    try:
        found = socket.getaddrinfo(master_address, _DISCARD, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        raise ConfigError(
            "MRL-1606",
            f"{socket.gethostname()} does not know a host {master_address[:80]!r} (MASTER_ADDR, or the first node).\n"
            "Set MASTER_ADDR to the first node's IP address, the same on all nodes.",
        ) from None
    return min(found, key=lambda one: one[0] != socket.AF_INET)  # type: ignore[return-value]


def interface_of(address: str) -> str | None:
    """The interface that has this address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None


def _outer_address() -> str | None:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for one in addresses:
            is_usable = one.family == socket.AF_INET and not ipaddress.ip_address(one.address).is_loopback
            if name in up and is_usable:
                return one.address
    return None


def _says_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("localhost", "ip6-localhost")
