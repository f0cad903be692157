"""What a worker process does: it scores samples with one reward function until the driver closes the pipe.

The first request says which function; every other one is a sample. Requests and replies travel on pipes of their own,
each as its length and its bytes.
"""

from __future__ import annotations

import inspect
import os
import sys

# by name: a reward that replaces them in their module spoils only itself
from json import dumps, loads
from typing import TYPE_CHECKING, Any

from megarl.core.errors import MegarlError
from megarl.rewards.guard import Isolation
from megarl.rewards.load import load_reward
from megarl.rewards.parcel import unwrap
from megarl.rewards.reward import Reward, RewardFunction
from megarl.rewards.score import call, checked, score

if TYPE_CHECKING:  # it is large, and most rewards do without
    import asyncio

HEADER_BYTES = 4
ID_BYTES = 8


class Worker:
    """Reads requests and writes replies until the driver closes the pipe."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests = requests
        self._replies = replies

    def work(self, isolation: Isolation) -> None:
        """Import the function, say that all is ready, and score what comes."""
        start = loads(self._read())
        sys.path[:] = start["path"]
        try:
            reward = load_reward(start["name"], start["options"])
        except MegarlError as error:
            self._reply(b"", _report(error))
            return
        is_async = inspect.iscoroutinefunction(inspect.unwrap(reward.function))
        sys.stdout.write(f"worker of reward {reward.name}, isolation: {isolation}\n")
        sys.stdout.flush()
        self._reply(b"", {"isolation": isolation, "is_async": is_async})
        if is_async:
            import asyncio

            # one event loop for all: a connection stays usable for the next sample
            asyncio.run(self._score_many(reward, start["timeout_seconds"]))
        else:
            self._score_each(reward)

    def _score_each(self, reward: RewardFunction) -> None:
        while request := self._read():
            prompt, sample = unwrap(request[ID_BYTES:])
            try:
                reply = _report(checked(reward, prompt, call(reward, prompt, sample)))
            except BaseException as error:
                reply = _report(error)
            self._reply(request[:ID_BYTES], reply)

    async def _score_many(self, reward: RewardFunction, timeout_seconds: float) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()

        async def one(request: bytes) -> None:
            prompt, sample = unwrap(request[ID_BYTES:])
            try:
                async with asyncio.timeout(timeout_seconds):
                    reply = _report(await score(reward, prompt, sample))
            except TimeoutError:
                reply = {"timeout": True}
            except BaseException as error:
                reply = _report(error)
            self._reply(request[:ID_BYTES], reply)

        while request := await loop.run_in_executor(None, self._read):
            task = asyncio.create_task(one(request))
            running.add(task)
            task.add_done_callback(running.discard)

    def _read(self) -> bytes:
        """The next request; empty when there are no more."""
        header = self._read_exactly(HEADER_BYTES)
        return self._read_exactly(int.from_bytes(header, "big")) if header else b""

    def _read_exactly(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._requests, size)
            if not part:
                return b""
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _reply(self, request_id: bytes, reply: dict[str, Any]) -> None:
        body = request_id + dumps(reply).encode()
        left = memoryview(len(body).to_bytes(HEADER_BYTES, "big") + body)
        while left:
            left = left[os.write(self._replies, left) :]


def _report(result: Reward | BaseException) -> dict[str, Any]:
    """What became of a sample, in plain values."""
    if isinstance(result, Reward):
        return {"value": result.value, "scores": result.scores}
    if isinstance(result, MegarlError):
        return {"error": str(result).removeprefix(f"{result.code} "), "code": result.code}
    return {"error": f"the worker failed with {type(result).__name__}: {result}"[:500], "code": "MRL-2110"}
