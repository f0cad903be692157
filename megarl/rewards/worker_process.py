"""One worker process, seen from the driver: start it, ask it, end it. All of it in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.rewards.guard import BROKEN, MAX_PROCESSES, STOPPED, TOO_MANY_PROCESSES
from megarl.rewards.outcome import RELAY_IS_LOST, Failure, from_reply
from megarl.rewards.relay_link import Relay, Relays
from megarl.rewards.relay_turns import turns
from megarl.rewards.reward import Reward
from megarl.rewards.serve import HEADER_BYTES, ID_BYTES
from megarl.rewards.start_worker import start_worker

_MAX_REPLY_BYTES = 1 << 16
_SECONDS_TO_END = 5.0
# how many samples an async function scores at a time
ASYNC_CONCURRENCY = 64
# What becomes of a process that stands for a worker elsewhere when the relay is lost; no worker's code is negative.
_RELAY_LOST = -signal.SIGPIPE


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Which function a worker runs, and its limits."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_seconds: float = 10.0
    start_timeout_seconds: float = 120.0
    memory_bytes: int = 8 << 30
    # a file for what the function prints, up to a mebibyte; None: it goes nowhere
    log: Path | None = None
    # on which machines; None: on this one
    relays: Relays | None = None


class WorkerLost(Exception):
    """The process is gone, or has to go, before it replied."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.text)
        self.failure = failure


class WorkerProcess:
    """A process that scores samples. It is started, and imports the function, at once; `ready` waits for that."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        log = str(spec.log.absolute() if spec.log else "")
        # The kernel ties the process to the thread that starts it: that of the event loop, which lives as long.
        self._relay: Relay | None = None
        if spec.relays is None:
            self._started = start_worker("worker", spec.memory_bytes, log)
        else:
            self._relay = turns.next(spec.relays.places)
            variables = spec.relays.only(self._relay).variables()
            self._started = start_worker("relayed", spec.memory_bytes, log, variables)
        self._process = self._started.process
        self._requests = os.fdopen(self._started.requests, "wb", 0)
        self._replies = os.fdopen(self._started.replies, "rb", 0)
        self._waiting: dict[bytes, asyncio.Future[Reward | Failure]] = {}
        self._num_calls = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._pipes: tuple[asyncio.BaseTransport, ...] = ()
        self._lost: Failure | None = None
        self._is_over = asyncio.Event()
        self.isolation = ""
        self.concurrency = 1
        self._starting = asyncio.create_task(self._get_ready())

    @property
    def pid(self) -> int:
        """Of the guard, the worker itself is below it; or of the process that stands for them."""
        return self._process.pid

    @property
    def is_lost(self) -> bool:
        """Whether it can be asked no more."""
        return self._lost is not None

    @property
    def is_fresh(self) -> bool:
        """Whether it has never been asked."""
        return self._num_calls == 0

    async def until_lost(self) -> None:
        """Wait until it can be asked no more."""
        await self._is_over.wait()

    async def ready(self) -> None:
        """Wait until the function is imported. Raises `WorkerLost` if it cannot be."""
        await asyncio.shield(self._starting)

    async def call(self, parcel: bytes) -> Reward | Failure:
        """Score one sample. Raises `WorkerLost` if the process dies or takes too long; it must be ended then."""
        if self._lost is not None:
            raise WorkerLost(self._lost)
        self._num_calls += 1
        request_id = os.urandom(ID_BYTES)  # nobody can reply to what was not asked
        future = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        self._send(request_id + parcel)
        try:
            # an async function is cancelled by its worker, on time; only one that blocks has to be killed
            grace = 0.25 if self.concurrency > 1 else 0.0
            async with asyncio.timeout(self._spec.timeout_seconds + grace):
                outcome: Reward | Failure = await future
                return outcome
        except TimeoutError:
            failure = await self._why_late()
            self._give_up(failure)
            raise WorkerLost(failure) from None
        finally:
            self._waiting.pop(request_id, None)

    async def end(self) -> None:
        """End the process and everything that it started, and remove its directory."""
        self._give_up(Failure("was stopped", "its worker was stopped", "MRL-2110"))
        await self._wait()
        await asyncio.wait([self._starting], timeout=_SECONDS_TO_END)  # its pipe ends with the process
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)  # who wanted to know has asked
        for pipe in self._pipes or (self._requests, self._replies):
            pipe.close()
        if self._reader is not None:
            self._reader.cancel()
        await asyncio.to_thread(shutil.rmtree, self._started.scratch, ignore_errors=True)

    def kill(self) -> None:
        """Begin to end it, without waiting."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    async def _get_ready(self) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        replies, _ = await loop.connect_read_pipe(lambda: protocol, self._replies)
        requests, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._requests)
        self._pipes, self._writer = (replies, requests), requests
        spec = self._spec
        path = [os.path.abspath(place) for place in sys.path]
        start = {"name": spec.name, "options": spec.options, "path": path, "timeout_seconds": spec.timeout_seconds}
        self._send(json.dumps(start).encode())
        try:
            async with asyncio.timeout(spec.start_timeout_seconds):
                reply = json.loads(await _read_frame(reader))
        except TimeoutError:
            limit = f"{spec.start_timeout_seconds:g} seconds (scoring.start_timeout_seconds)"
            text = f"it was not ready after {limit}: importing it takes too long"
            raise WorkerLost(Failure("could not start", text, "MRL-2111")) from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            raise WorkerLost(self._ending("could not start", await self._last_words(), "MRL-2111")) from None
        if not isinstance(reply, dict) or "isolation" not in reply:
            told = from_reply(reply)
            text, code = (told.text, told.code) if isinstance(told, Failure) else ("it replied too early", "MRL-2110")
            if self._relay is not None and code == RELAY_IS_LOST.code:
                turns.lose(self._relay, str(reply.get("why")))
            raise WorkerLost(Failure("could not start", text, code))
        if self._relay is not None:
            turns.find(self._relay)
        self.isolation = str(reply["isolation"])
        self.concurrency = ASYNC_CONCURRENCY if reply.get("is_async") is True else 1
        self._reader = asyncio.create_task(self._read(reader))

    async def _wait(self) -> int:
        """The guard's exit code, once it is asked to end."""
        self.kill()
        try:
            async with asyncio.timeout(_SECONDS_TO_END):
                while self._process.poll() is None:
                    await asyncio.sleep(0.005)
        except TimeoutError:  # it was stopped, or worse
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        return self._process.returncode

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                frame = await _read_frame(reader)
                future = self._waiting.get(frame[:ID_BYTES])
                if future is None or future.done():
                    raise ValueError("a reply to what was not asked")
                reply = json.loads(frame[ID_BYTES:])
                is_late = isinstance(reply, dict) and reply.get("timeout") is True
                future.set_result(Failure.of_time(self._spec.timeout_seconds) if is_late else from_reply(reply))
        except (OSError, ValueError, RecursionError, asyncio.IncompleteReadError) as error:
            if isinstance(error, asyncio.IncompleteReadError):
                failure = self._ending("ended its worker", await self._how_it_ended(), "MRL-2113")
            else:
                failure = Failure("broke the connection", "its worker sent something that is no reply", "MRL-2110")
            self._give_up(failure)

    def _give_up(self, failure: Failure) -> None:
        """Whoever waits for a reply is told, and the process is killed."""
        if self._lost is not None:
            return
        self._lost = failure
        self._is_over.set()
        self.kill()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerLost(failure))

    def _send(self, body: bytes) -> None:
        assert self._writer is not None, "ready first"
        self._writer.write(len(body).to_bytes(HEADER_BYTES, "big") + body)

    async def _how_it_ended(self) -> str:
        """In words, after the reply pipe was closed."""
        for _ in range(100):  # a guard tells what it saw; nobody who merely closed the pipe has ended
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.005)
        code = self._process.poll()
        if code is None or code in (STOPPED, BROKEN):
            return "it closed the descriptors of its worker"
        if code == TOO_MANY_PROCESSES:
            return f"it started more than {MAX_PROCESSES} processes"
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"its worker was ended by {signal.Signals(code - 128).name}"
        return f"its worker ended with exit code {code}"

    async def _last_words(self) -> str:
        ended = await self._how_it_ended()
        words = self._started.last_words()
        return f"{ended} while it started{': ' + words if words else ''}"

    async def _why_late(self) -> Failure:
        """It took too long; unless its relay is silent, which a process that stands for a worker says in the end."""
        late = Failure.of_time(self._spec.timeout_seconds)
        if self._relay is None:
            return late
        self.kill()
        await self._how_it_ended()
        return self._ending(late.kind, late.text, late.code)

    def _ending(self, kind: str, text: str, code: str) -> Failure:
        """Why the process ended: what is said here, unless the way to its worker was lost."""
        if self._relay is None or self._process.poll() != _RELAY_LOST:
            return Failure(kind, text, code)
        turns.lose(self._relay, self._started.last_words())
        return RELAY_IS_LOST


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
    if not 0 < size <= _MAX_REPLY_BYTES:
        raise ValueError(f"a reply of {size} bytes")
    return await reader.readexactly(size)
