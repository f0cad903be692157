"""``python -m megarl.rewards.relayed``: what the driver starts in place of a worker that lives on another machine.

To the driver it is the worker: the same pipes, the same exit codes, ended by the same signal. It runs nothing of the
user's; it hands on what is said. When it ends, its connection is closed, and the relay ends the worker. A relay that is
lost, or silent, it tells by the signal that ends it, and why by its last words.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import sys
import threading
import time
from typing import NoReturn

from megarl.rewards.guard import STOPPED, Terms, end_with_parent
from megarl.rewards.relay_link import (
    BEAT,
    HEADER_BYTES,
    SECONDS_BETWEEN_BEATS,
    SECONDS_OF_SILENCE,
    SECONDS_TO_MEET,
    Relay,
    framed,
    meet_relay,
    read_exactly,
    read_relays,
    tune,
)

_CHUNK_BYTES = 1 << 16
# Who is ended because a sample took too long blames the relay if it missed two beats.
_SECONDS_OF_DOUBT = 2.5 * SECONDS_BETWEEN_BEATS
_SECONDS_FOR_THE_DRIVER = 0.5


def main() -> None:
    """The driver's terms are the only argument; the relay is in the environment."""
    terms = Terms(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: _end(STOPPED))
    if not end_with_parent(terms.driver, signal.SIGTERM):
        _end(STOPPED)
    relays = read_relays(os.environ)
    assert relays is not None, "only for a relay"
    relay = relays.places[0]
    try:
        connection = _connect(relay, relays.token)
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        _write(terms.replies, framed(json.dumps(_unreachable(relay, reason)).encode()))
        _end(STOPPED)
    heard = _Heard(terms.driver)
    try:
        connection.sendall(framed(json.dumps({"memory_bytes": terms.memory_bytes, "log": terms.log}).encode()))
        threading.Thread(target=_hand_requests_on, args=(terms.requests, connection), daemon=True).start()
        while size := int.from_bytes(read_exactly(connection, HEADER_BYTES), "big"):
            heard.now()
            if size == BEAT:
                continue
            if size > _CHUNK_BYTES:
                raise ConnectionAbortedError("that is no relay")
            _write(terms.replies, read_exactly(connection, size))
        code = read_exactly(connection, 1)[0]
        sys.stderr.write(connection.recv(_CHUNK_BYTES).decode(errors="replace"))
    except OSError as error:
        why = heard.since() if isinstance(error, BlockingIOError) else error.strerror or str(error)
        # A driver that is killed takes relays of its machine with it: then its signal is on the way, and ends this.
        time.sleep(_SECONDS_FOR_THE_DRIVER)
        _vanish(why)
    sys.stderr.flush()
    os._exit(code)  # its directory, with its last words, is the driver's to remove


def _connect(relay: Relay, token: str) -> socket.socket:
    connection = socket.create_connection((relay.host, relay.port), SECONDS_TO_MEET)
    tune(connection)
    try:
        is_ours = meet_relay(connection, token)
    except ConnectionError:
        raise ConnectionRefusedError("it turns this run away: it has another token, or no room") from None
    if not is_ours:
        raise ConnectionRefusedError("it does not know this run's token")
    connection.settimeout(None)
    # of receiving alone: a long sample may take its time on the way there
    patience = struct.pack("ll", int(SECONDS_OF_SILENCE), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    return connection


class _Heard:
    """When the relay last said something."""

    def __init__(self, driver: int) -> None:
        self._driver = driver
        self.now()
        signal.signal(signal.SIGTERM, lambda *_: self._leave())

    def now(self) -> None:
        self._at = time.monotonic()

    def since(self) -> str:
        at = time.time() - (time.monotonic() - self._at)
        return f"silent since {time.strftime('%H:%M:%S', time.localtime(at))}"

    def _leave(self) -> NoReturn:
        """Asked to end, while the driver is there to be told."""
        if os.getppid() == self._driver and time.monotonic() - self._at > _SECONDS_OF_DOUBT:
            _vanish(self.since())
        _end(STOPPED)


def _unreachable(relay: Relay, reason: str) -> dict[str, str]:
    text = f"the relay for reward workers at {relay.host}:{relay.port} cannot be used ({reason})"
    return {"error": text, "code": "MRL-5324", "why": reason}


def _hand_requests_on(requests: int, connection: socket.socket) -> None:
    """Until the driver has no more, or is gone; a lost relay is noticed where replies are read."""
    try:
        while data := os.read(requests, _CHUNK_BYTES):
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _write(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _vanish(why: str) -> NoReturn:
    """The relay is lost. Told by a signal: no worker can end like this, as its codes are passed on as numbers."""
    sys.stderr.write(f"{why}\n")
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    raise AssertionError("a signal that ends the process")


def _end(code: int) -> NoReturn:
    """The driver, whose directory this is, may be gone."""
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    os._exit(code)


if __name__ == "__main__":
    main()
