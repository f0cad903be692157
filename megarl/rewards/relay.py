"""``python -m megarl.rewards.relay HOST``: reward workers on this machine, for a driver on another.

A connection is one worker: an ordinary guard with an ordinary worker below it, with the same limits. The relay copies
requests and replies, and knows no more of them than how many bytes there are. When the connection is closed the worker
and everything below it is ended; when the relay ends, so do its guards.

The token comes as the first line of standard input, which its parent keeps open: when that is closed, the relay ends.
The port on which it listens is its one line of output.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
import time

from megarl.rewards.guard import BROKEN, STOPPED
from megarl.rewards.relay_link import (
    BEAT,
    HEADER_BYTES,
    SECONDS_BETWEEN_BEATS,
    SECONDS_TO_MEET,
    framed,
    may_listen,
    meet_driver,
    read_frame,
    tune,
)
from megarl.rewards.start_worker import Started, start_worker

_MAX_WORKERS = 1024
# a connection, two pipes, and room for starting a worker
_DESCRIPTORS_EACH = 4
_MIN_TOKEN_BYTES = 16
_CHUNK_BYTES = 1 << 16
_SECONDS_TO_SETTLE = 0.5
_SECONDS_TO_END = 5.0
_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


def main() -> None:
    """Serve until standard input is closed."""
    host = sys.argv[1]
    if not may_listen(host):
        _say(f"{host} is no private address: a relay for reward workers does not listen there.")
        sys.exit(64)
    token = sys.stdin.readline().strip()
    if len(bytes.fromhex(token)) < _MIN_TOKEN_BYTES:
        _say("The token of a relay for reward workers is too short.")
        sys.exit(64)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=128)
    except OSError as error:
        _say(f"A relay for reward workers cannot listen on {host}: {error.strerror}.")
        sys.exit(69)
    _say(str(listener.getsockname()[1]))
    _listen(listener, token)


def _listen(listener: socket.socket, token: str) -> None:
    path = [os.path.abspath(place) for place in sys.path]
    seats = threading.BoundedSemaphore(_num_seats())
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(sys.stdin, select.POLLIN)
    while True:
        if any(descriptor == sys.stdin.fileno() for descriptor, _ in poller.poll()):
            os._exit(0)  # the kernel tells all guards
        with contextlib.suppress(OSError):  # whoever has gone away already
            connection, _ = listener.accept()
            if seats.acquire(blocking=False):
                # one thread from start to end: its guard ends with it
                threading.Thread(target=_attend, args=(connection, token, path, seats), daemon=True).start()
            else:
                connection.close()


def _num_seats() -> int:
    """How many workers there may be at once: as many as this process may hold the connections of."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_WORKERS * _DESCRIPTORS_EACH
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(1, allowed // _DESCRIPTORS_EACH - 8)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _attend(connection: socket.socket, token: str, path: list[str], seats: threading.BoundedSemaphore) -> None:
    """Whoever does not know the token, or says something else than expected, is left without a word."""
    try:
        with connection, contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            connection.settimeout(SECONDS_TO_MEET)
            tune(connection)
            if meet_driver(connection, token):
                _serve(connection, path)
    finally:
        seats.release()


def _serve(connection: socket.socket, path: list[str]) -> None:
    """Start a worker, and let the driver talk to it until one of them is gone."""
    terms, start = json.loads(read_frame(connection)), json.loads(read_frame(connection))
    memory_bytes, log = int(terms["memory_bytes"]), str(terms["log"])
    # modules are found here as the trainer finds them there: both run in the job's working directory
    opening = framed(json.dumps({**start, "path": path}).encode())
    try:
        worker = start_worker("worker", memory_bytes, log)
    except OSError as error:
        connection.sendall(_last(BROKEN, f"the relay's machine starts no worker ({error.strerror})"))
        return
    try:
        if _Talk(connection, worker, opening).until_the_end():
            code = _settle(worker.process)
            connection.settimeout(SECONDS_TO_MEET)
            connection.sendall(_last(code, worker.last_words()))
    finally:
        _put_away(worker)


class _Talk:
    """Copies between a connection and a worker's pipes, never more ahead of one side than a chunk.

    A driver that hears nothing of a worker hears that the relay is there.
    """

    def __init__(self, connection: socket.socket, worker: Started, opening: bytes) -> None:
        self._connection, self._worker = connection, worker
        self._to_worker, self._to_driver = opening, b""
        self._spoke = time.monotonic()
        connection.setblocking(False)
        os.set_blocking(worker.requests, False)
        os.set_blocking(worker.replies, False)

    def until_the_end(self) -> bool:
        """True: the worker has no more to say. False: the driver has closed the connection."""
        own = self._connection.fileno()
        requests, replies = self._worker.requests, self._worker.replies
        while True:
            poller = select.poll()
            wanted = (0 if self._to_worker else select.POLLIN) | (select.POLLOUT if self._to_driver else 0)
            poller.register(own, wanted | select.POLLRDHUP)
            if self._to_worker:
                poller.register(requests, select.POLLOUT)
            if not self._to_driver:
                poller.register(replies, select.POLLIN)
            events = dict(poller.poll(SECONDS_BETWEEN_BEATS * 1000))
            if events.get(own, 0) & _GONE:
                return False
            if requests in events and not self._feed():
                # it reads no more; what it still has to say comes first
                self._to_worker = b""
            if replies in events:
                said = os.read(replies, _CHUNK_BYTES)
                if not said:
                    return True
                self._say(framed(said))
            elif not self._to_driver and time.monotonic() - self._spoke >= SECONDS_BETWEEN_BEATS:
                self._say(BEAT.to_bytes(HEADER_BYTES, "big"))
            if events.get(own, 0) & select.POLLIN:
                self._to_worker = self._connection.recv(_CHUNK_BYTES)
            if events.get(own, 0) & select.POLLOUT:
                self._to_driver = self._to_driver[self._connection.send(self._to_driver) :]

    def _say(self, words: bytes) -> None:
        self._to_driver, self._spoke = words, time.monotonic()

    def _feed(self) -> bool:
        """Write what the pipe takes; returns whether anybody reads it."""
        try:
            self._to_worker = self._to_worker[os.write(self._worker.requests, self._to_worker) :]
        except BlockingIOError:
            return True  # there is room, but not for this much
        except BrokenPipeError:
            return False
        return True


def _settle(process: subprocess.Popen[bytes]) -> int:
    """A guard tells what it saw; nobody who merely closed the pipe has ended."""
    try:
        code = process.wait(_SECONDS_TO_SETTLE)
        return code if code >= 0 else 128 - code
    except subprocess.TimeoutExpired:
        return STOPPED


def _put_away(worker: Started) -> None:
    worker.process.terminate()
    os.close(worker.requests)
    os.close(worker.replies)
    try:
        worker.process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:  # it was stopped, or worse
        worker.process.kill()
        worker.process.wait()
    shutil.rmtree(worker.scratch, ignore_errors=True)


def _last(code: int, words: str) -> bytes:
    """Behind a length of zero: how the worker ended."""
    return framed(b"") + bytes([code]) + words.encode()[:1024]


if __name__ == "__main__":
    main()
