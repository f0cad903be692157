"""Asking a server about a sample: JSON there and back, with retries, and with limits on everything that comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import aiohttp

from megarl.core.errors import DataError
from megarl.core.excerpt import excerpt
from megarl.core.secret import is_reference, resolve

MAX_REPLY_BYTES = 1 << 20
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.2, 10.0

# One session per event loop, and so per reward of a run: connections are used again. The task ends with the loop.
_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, asyncio.Task[None]]]
_sessions = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Call:
    """Whom to ask, in whose name, and how patiently."""

    reward: str
    url: str
    timeout_seconds: float
    max_tries: int
    headers: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None

    async def post(self, body: Mapping[str, Any]) -> Any:
        """The JSON of the reply. Raises DataError if there is none after all tries, or if it is no JSON."""
        session = await _session()
        headers = {name: _looked_up(value) for name, value in self.headers.items()}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {_looked_up(self.api_key)}"
        data = json.dumps(body).encode()
        problem = ""
        for attempt in range(self.max_tries):
            wait = min(_FIRST_WAIT_SECONDS * 2**attempt, _LONGEST_WAIT_SECONDS)
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    async with session.post(self.url, data=data, headers=headers, allow_redirects=False) as reply:
                        if reply.status == 200:
                            return self._parsed(await _read(reply))
                        problem = f"status {reply.status}"
                        if reply.status != 429 and reply.status < 500:
                            break  # it would say the same again
                        wait = max(wait, _asked_to_wait(reply))
            except TimeoutError:
                problem = f"no reply in {self.timeout_seconds:g} seconds"
            except (aiohttp.ClientError, OSError) as error:
                problem = f"{type(error).__name__}: {excerpt(str(error))}"
            if attempt + 1 < self.max_tries:
                await asyncio.sleep(wait)
        raise DataError("MRL-2184", f'reward "{self.reward}": {self._place()} did not answer ({problem}).')

    def refuse(self, what: str) -> NoReturn:
        """Raise the error for a reply that is not what was asked for."""
        raise DataError("MRL-2185", f'reward "{self.reward}": {self._place()} answered with {what}.')

    def _place(self) -> str:
        """Without the query, which may hold anything."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def _parsed(self, data: bytes) -> Any:
        if len(data) > MAX_REPLY_BYTES:
            self.refuse(f"more than {MAX_REPLY_BYTES} bytes")
        try:
            return json.loads(data, parse_constant=_no_number)
        except (ValueError, RecursionError):
            self.refuse(f"something that is not JSON: {excerpt(data[:200].decode(errors='replace'))}")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    """The body, or a little more than is allowed of it."""
    parts: list[bytes] = []
    size = 0
    while size <= MAX_REPLY_BYTES and (part := await reply.content.read(1 << 16)):
        parts.append(part)
        size += len(part)
    if size > MAX_REPLY_BYTES:
        reply.close()  # nobody waits for the rest
    return b"".join(parts)


def _asked_to_wait(reply: aiohttp.ClientResponse) -> float:
    """The seconds of ``Retry-After``, if it is given in seconds."""
    text = reply.headers.get("Retry-After", "")
    return min(float(text), _LONGEST_WAIT_SECONDS) if text.isascii() and text.isdigit() else 0.0


def _looked_up(value: str) -> str:
    return resolve(value).reveal() if is_reference(value) else value


async def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        # Compressed replies are not asked for: a small one could be a large one. Certificates are checked by default.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        connector = aiohttp.TCPConnector(limit=0)  # the scorer bounds how many samples are asked about at a time
        session = aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False)
        _sessions[loop] = session, loop.create_task(_close_at_the_end(session))
    return _sessions[loop][0]


async def _close_at_the_end(session: aiohttp.ClientSession) -> None:
    """Whoever ends an event loop cancels its tasks, and with this one the session is closed."""
    try:
        await asyncio.Event().wait()
    finally:
        await session.close()
