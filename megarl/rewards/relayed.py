"""``python -m megarl.rewards.relayed``: what the driver starts in place of a worker that lives on another machine.

To the driver it is the worker: the same pipes, the same exit codes, ended by the same signal. It runs nothing of the
user's; it hands on what is said. When it ends, its connection is closed, and the relay ends the worker.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
from typing import NoReturn

from megarl.rewards.guard import STOPPED, Terms, end_with_parent
from megarl.rewards.relay_link import (
    HEADER_BYTES,
    SECONDS_TO_MEET,
    Relay,
    framed,
    meet_relay,
    read_exactly,
    read_relays,
    tune,
)

_CHUNK_BYTES = 1 << 16


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
    try:
        connection.sendall(framed(json.dumps({"memory_bytes": terms.memory_bytes, "log": terms.log}).encode()))
        threading.Thread(target=_hand_requests_on, args=(terms.requests, connection), daemon=True).start()
        while size := int.from_bytes(read_exactly(connection, HEADER_BYTES), "big"):
            if size > _CHUNK_BYTES:
                raise ConnectionAbortedError("that is no relay")
            _write(terms.replies, read_exactly(connection, size))
        code = read_exactly(connection, 1)[0]
        sys.stderr.write(connection.recv(_CHUNK_BYTES).decode(errors="replace"))
    except OSError:
        _vanish()
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
    return connection


def _unreachable(relay: Relay, reason: str) -> dict[str, str]:
    text = f"the relay for reward workers at {relay.host}:{relay.port} cannot be used ({reason})"
    return {"error": text, "code": "MRL-5324"}


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


def _vanish() -> NoReturn:
    """The relay is lost. Told by a signal: no worker can end like this, as its codes are passed on as numbers."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    raise AssertionError("a signal that ends the process")


def _end(code: int) -> NoReturn:
    """The driver, whose directory this is, may be gone."""
    shutil.rmtree(os.getcwd(), ignore_errors=True)
    os._exit(code)


if __name__ == "__main__":
    main()
