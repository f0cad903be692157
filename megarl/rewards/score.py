"""The only place that calls reward functions.

A reward that fails, or that gives anything but a finite number, raises an error that names the function and the prompt.
It never becomes a zero: a zero is a training signal.
"""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Awaitable
from typing import Any

from megarl.core.blame import describe_failure
from megarl.core.errors import DataError, MegarlError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt, Sample
from megarl.rewards.reward import Reward, RewardFunction

# A name becomes a part of a metric's name, on the console too.
NAME = re.compile(r"[A-Za-z0-9_-]([A-Za-z0-9._-]{0,78}[A-Za-z0-9_-])?")
MAX_SCORES = 100


async def score(reward: RewardFunction, prompt: Prompt, sample: Sample) -> Reward:
    """What the sample is worth; awaits what an async function gives."""
    result = call(reward, prompt, sample)
    if inspect.isawaitable(result):
        result = await finish(reward, prompt, result)
    return checked(reward, prompt, result)


def call(reward: RewardFunction, prompt: Prompt, sample: Sample) -> Any:
    """Whatever the function returns, not yet checked nor awaited. Its failure is a `MegarlError`."""
    try:
        return reward.function(prompt, sample, **reward.options)
    except (Exception, SystemExit) as error:
        raise _failure(reward, prompt, error) from error


async def finish(reward: RewardFunction, prompt: Prompt, result: Awaitable[Any]) -> Any:
    """Await what an async function returned. Its failure is a `MegarlError`."""
    try:
        return await result
    except (Exception, SystemExit) as error:
        raise _failure(reward, prompt, error) from error


def checked(reward: RewardFunction, prompt: Prompt, result: Any) -> Reward:
    """The result as finite numbers; anything else is a `DataError`."""
    if not isinstance(result, Reward):
        return Reward(_number(reward, prompt, "returned", result))
    scores = result.scores
    if not isinstance(scores, dict) or not all(isinstance(name, str) and NAME.fullmatch(name) for name in scores):
        raise _wrong(reward, prompt, "returned scores", scores, "numbers by name, of letters, digits, '.', '_' and '-'")
    if len(scores) > MAX_SCORES:
        raise _wrong(reward, prompt, "returned scores", list(scores), f"at most {MAX_SCORES} of them")
    return Reward(
        _number(reward, prompt, "returned Reward.value", result.value),
        {name: _number(reward, prompt, f"returned score {_shown(name)}", score) for name, score in scores.items()},
    )


def _failure(reward: RewardFunction, prompt: Prompt, error: BaseException) -> MegarlError:
    """The user's exception in one line, with the deepest line of the user's file; our own errors stay as they are."""
    if isinstance(error, MegarlError):
        return error
    return DataError(
        "MRL-2102",
        f'reward "{reward.name}" raised {describe_failure(error, reward.function)} for prompt {_shown(prompt.id)}.',
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
