"""Scoring: the only place that calls reward functions.

A reward that fails, or that gives anything but a finite number, stops the run with an error that names the function and
the prompt. It never becomes a zero: a zero is a training signal.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import re
import traceback
from collections.abc import Awaitable, Sequence
from pathlib import PurePath
from typing import Any

from megarl.core.errors import DataError, MegarlError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards.reward import Reward, RewardFunction

# A name becomes a part of a metric's name, on the console too.
_NAME = re.compile(r"[A-Za-z0-9_-]([A-Za-z0-9._-]{0,78}[A-Za-z0-9_-])?")


def score_groups(groups: Sequence[Group], reward: RewardFunction, max_concurrency: int = 256) -> None:
    """Set ``reward`` and ``scores`` of every sample; async rewards run concurrently, ``max_concurrency`` at a time."""
    pairs = [(group.prompt, sample) for group in groups for sample in group.samples]
    results: list[Any] = []
    try:
        for prompt, sample in pairs:
            results.append(_call(reward, prompt, sample))
        pending = [index for index, result in enumerate(results) if inspect.isawaitable(result)]
        if pending:
            prompts = [pairs[index][0] for index in pending]
            finished = _finish_all(reward, prompts, [results[index] for index in pending], max_concurrency)
            for index, result in zip(pending, finished, strict=True):
                results[index] = result
    finally:
        for result in results:
            if inspect.iscoroutine(result):
                result.close()  # after a failure: what never started must not warn about it
    for (prompt, sample), result in zip(pairs, results, strict=True):
        checked = _checked(reward, prompt, result)
        sample.reward, sample.scores = checked.value, checked.scores


def _call(reward: RewardFunction, prompt: Prompt, sample: Sample) -> Any:
    try:
        return reward.function(prompt, sample, **reward.options)
    except (Exception, SystemExit) as error:
        raise _failure(reward, prompt, error) from error


def _finish_all(
    reward: RewardFunction, prompts: Sequence[Prompt], awaitables: Sequence[Awaitable[Any]], max_concurrency: int
) -> list[Any]:
    """Await all; the first failure cancels the rest."""

    async def finish(prompt: Prompt, awaitable: Awaitable[Any], gate: asyncio.Semaphore) -> Any:
        async with gate:
            try:
                return await awaitable
            except (Exception, SystemExit) as error:
                raise _failure(reward, prompt, error) from error

    async def finish_all() -> list[Any]:
        gate = asyncio.Semaphore(max_concurrency)
        tasks = [
            asyncio.create_task(finish(prompt, awaitable, gate))
            for prompt, awaitable in zip(prompts, awaitables, strict=True)
        ]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    return reward.runner.run(finish_all())


def _failure(reward: RewardFunction, prompt: Prompt, error: BaseException) -> MegarlError:
    """The user's exception in one line, with the deepest line of the user's file; our own errors stay as they are."""
    if isinstance(error, MegarlError):
        return error
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(reward.function), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = (own or list(frames))[-1]
    return DataError(
        "MRL-2102",
        f'reward "{reward.name}" raised {type(error).__name__}: {_shown(str(error))} '
        f"({PurePath(place.filename).name}:{place.lineno}) for prompt {_shown(prompt.id)}.",
    )


def _checked(reward: RewardFunction, prompt: Prompt, result: Any) -> Reward:
    if not isinstance(result, Reward):
        return Reward(_number(reward, prompt, "returned", result))
    scores = result.scores
    if not isinstance(scores, dict) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in scores):
        raise _wrong(reward, prompt, "returned scores", scores, "numbers by name, of letters, digits, '.', '_' and '-'")
    return Reward(
        _number(reward, prompt, "returned Reward.value", result.value),
        {name: _number(reward, prompt, f"returned score {_shown(name)}", score) for name, score in scores.items()},
    )


def _number(reward: RewardFunction, prompt: Prompt, what: str, value: Any) -> float:
    """A finite number as float. True and 0-d tensors are refused: they are usually a forgotten conversion."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong(reward, prompt, what, value, "a number or Reward" if what == "returned" else "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _wrong(reward, prompt, what, value, "a finite number")
    return number


def _wrong(reward: RewardFunction, prompt: Prompt, what: str, got: Any, expected: str) -> DataError:
    return DataError(
        "MRL-2103",
        f'reward "{reward.name}" {what} {_shown(got)} ({type(got).__name__}) for prompt {_shown(prompt.id)}.\n'
        f"Expected {expected}.",
    )


def _shown(value: Any) -> str:
    """A foreign value, however it behaves, as a short and harmless text."""
    if isinstance(value, str):
        return excerpt(value)
    try:
        text = repr(value)
    except Exception:  # a user's __repr__ may fail in any way
        text = "an object that cannot be shown"
    return excerpt(text)[1:-1]
