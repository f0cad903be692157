"""Rewards that run in the driver itself: our own functions, either done in microseconds or async."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import Future

from megarl.core.errors import MegarlError
from megarl.core.loop_thread import LoopThread
from megarl.core.sample import Prompt, Sample
from megarl.rewards.outcome import Failure, from_error
from megarl.rewards.reward import Reward, RewardFunction
from megarl.rewards.score import call, checked, score

MAX_CONCURRENCY = 256


class DriverCalls:
    """Calls one function. An async one runs in an event loop of its own, many samples at a time."""

    def __init__(self, reward: RewardFunction, timeout_seconds: float, max_concurrency: int = MAX_CONCURRENCY) -> None:
        self._reward = reward
        self._timeout_seconds = timeout_seconds
        self._gate = asyncio.Semaphore(max_concurrency)
        is_async = inspect.iscoroutinefunction(inspect.unwrap(reward.function))
        self._loop = LoopThread(f"reward {reward.name}") if is_async else None

    def submit(self, prompt: Prompt, sample: Sample) -> Future[Reward | Failure]:
        """Score a sample; at once, or in the background."""
        if self._loop is not None:
            return self._loop.submit(self._score(prompt, sample))
        done: Future[Reward | Failure] = Future()
        try:
            done.set_result(checked(self._reward, prompt, call(self._reward, prompt, sample)))
        except MegarlError as error:
            done.set_result(from_error(error))
        return done

    def close(self) -> None:
        """Cancel what is under way."""
        if self._loop is not None:
            self._loop.close()

    async def _score(self, prompt: Prompt, sample: Sample) -> Reward | Failure:
        async with self._gate:
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    return await score(self._reward, prompt, sample)
            except TimeoutError:
                return Failure.of_time(self._timeout_seconds)
            except MegarlError as error:
                return from_error(error)
