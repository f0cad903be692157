"""What a relay of reward workers and the driver agree on: where it is, how each proves to know the run's token.

The token never travels: each side sends random bytes, and the other returns a digest of them with the token. What
follows is not encrypted, so a relay listens on loopback or in a private network only.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.core.errors import ConfigError

# How the driver's rank learns of relays; set by megarl's own launchers.
RELAYS = "MEGARL_REWARD_RELAYS"
TOKEN = "MEGARL_REWARD_TOKEN"

HEADER_BYTES = 4
# the driver's terms, and which function a worker is to import
MAX_OPENING_BYTES = 1 << 24
# Time to prove oneself; nobody who may come in needs it all.
SECONDS_TO_MEET = 5.0
_NONCE_BYTES = DIGEST_BYTES = 32
# A relay says at least so often that it is there, by a header without a frame. A process that was stopped does not,
# whereas its kernel would still answer for it.
SECONDS_BETWEEN_BEATS = 1.0
BEAT = (1 << 8 * HEADER_BYTES) - 1
# Who says nothing for so long is lost: before a sample takes too long.
SECONDS_OF_SILENCE = 4.0


@dataclass(frozen=True, slots=True)
class Relay:
    """Where a relay listens, and how many cores are reserved there."""

    host: str
    port: int
    num_cpus: int


@dataclass(frozen=True, slots=True)
class Relays:
    """All relays of a run. They share its token."""

    places: tuple[Relay, ...]
    token: str = field(repr=False)

    @property
    def num_cpus(self) -> int:
        """Of all of them."""
        return sum(relay.num_cpus for relay in self.places)

    def only(self, relay: Relay) -> Relays:
        """This one."""
        return Relays((relay,), self.token)

    def variables(self) -> dict[str, str]:
        """The environment that tells a process of them."""
        return {RELAYS: json.dumps([asdict(relay) for relay in self.places]), TOKEN: self.token}


def read_relays(environment: Mapping[str, str]) -> Relays | None:
    """What `Relays.variables` wrote; None: workers are processes of this machine."""
    if RELAYS not in environment:
        return None
    try:
        listed: list[dict[str, Any]] = json.loads(environment[RELAYS])
        places = tuple(Relay(str(one["host"]), int(one["port"]), int(one["num_cpus"])) for one in listed)
        token = environment[TOKEN]
        bytes.fromhex(token)
        if not places or not token:
            raise ValueError("it is empty")
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            "MRL-1675", f"{RELAYS} and {TOKEN} are not what a launcher wrote.\nOnly megarl sets them: unset both."
        ) from None
    return Relays(places, token)


def may_listen(host: str) -> bool:
    """Whether this is one address, and no machine of the public network reaches it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (address.is_global or address.is_unspecified or address.is_multicast)


def meet_relay(connection: socket.socket, token: str) -> bool:
    """The driver's side: prove to know the token, and have the relay prove it."""
    own, theirs = os.urandom(_NONCE_BYTES), read_exactly(connection, _NONCE_BYTES)
    connection.sendall(own + _digest(token, b"driver", theirs, own))
    return hmac.compare_digest(read_exactly(connection, DIGEST_BYTES), _digest(token, b"relay", theirs, own))


def meet_driver(connection: socket.socket, token: str) -> bool:
    """The relay's side. Who does not know the token is told nothing."""
    own = os.urandom(_NONCE_BYTES)
    connection.sendall(own)
    answer = read_exactly(connection, _NONCE_BYTES + DIGEST_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _digest(token, b"driver", own, theirs)):
        return False
    connection.sendall(_digest(token, b"relay", own, theirs))
    return True


def _digest(token: str, side: bytes, of_relay: bytes, of_driver: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(token), side + of_relay + of_driver, "sha256")


def read_exactly(connection: socket.socket, size: int) -> bytes:
    """So many bytes; raises ConnectionError if the other side is gone before."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise ConnectionResetError("the other side has closed the connection")
        found += part
    return bytes(found)


def read_frame(connection: socket.socket) -> bytes:
    """Bytes behind their length; raises ValueError if there are too many, or none."""
    size = int.from_bytes(read_exactly(connection, HEADER_BYTES), "big")
    if not 0 < size <= MAX_OPENING_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    return read_exactly(connection, size)


def framed(body: bytes) -> bytes:
    """A length and its bytes."""
    return len(body).to_bytes(HEADER_BYTES, "big") + body


def tune(connection: socket.socket) -> None:
    """Small messages leave at once, and a machine that has vanished is missed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SECONDS_OF_SILENCE * 1000))
