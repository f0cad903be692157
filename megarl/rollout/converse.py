"""A user's ``converse(prompt, generate)``: found, checked, and run beside many others of its kind."""

from __future__ import annotations

import inspect
import math
import numbers
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from megarl.core.blame import describe_failure
from megarl.core.errors import ConfigError, DataError
from megarl.core.excerpt import excerpt
from megarl.core.importing import import_callable
from megarl.core.loop_thread import LoopThread
from megarl.core.sample import Prompt
from megarl.rewards.reward import Reward

# what the function returned, or what it raised
Returned = Callable[[Any, BaseException | None], None]
# How long an event loop may take to show that it is alive, before it is left to whoever blocks it.
_SECONDS_TO_ANSWER = 1.0


class Converse:
    """The function as the configuration names it. Of the driver.

    A plain function runs in a thread of its own, an ``async def`` in the one event loop of all. Threads and loop are
    daemons: code that never returns keeps neither a step nor the process waiting.
    """

    def __init__(self, name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name = name
        self.function = function
        self.is_async = is_async(function)
        self._options = options
        self._loop: LoopThread | None = None

    def start(self, prompt: Prompt, generate: Callable[..., Any], returned: Returned) -> Callable[[], object]:
        """Begin a conversation; ``returned`` is called from wherever it ran. The result cancels it, if that can be."""
        if self.is_async:
            return self._running_loop().submit(self._await(prompt, generate, returned)).cancel
        target = threading.Thread(
            target=self._call, args=(prompt, generate, returned), name=f"converse {prompt.id}", daemon=True
        )
        target.start()
        return _nothing

    def replace_blocked_loop(self) -> None:
        """If a function blocks the event loop, leave the loop to it: the next conversations get a new one."""
        if self._loop is not None and not _answers(self._loop):
            self._loop = None

    def close(self) -> None:
        """End the event loop, unless it is blocked."""
        self.replace_blocked_loop()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    def failure(self, error: BaseException) -> str:
        """Why a sample has no outcome, if the function raised this."""
        return f'MRL-2150 converse "{self.name}" raised {describe_failure(error, self.function)}'

    def _running_loop(self) -> LoopThread:
        if self._loop is None:
            self._loop = LoopThread("conversations")
        return self._loop

    def _call(self, prompt: Prompt, generate: Callable[..., Any], returned: Returned) -> None:
        try:
            result = self.function(prompt, generate, **self._options)
        except BaseException as error:  # a thread has nobody above it: even a SystemExit is one conversation's failure
            returned(None, error)
        else:
            returned(result, None)

    async def _await(self, prompt: Prompt, generate: Callable[..., Any], returned: Returned) -> None:
        try:
            result = await self.function(prompt, generate, **self._options)
        except BaseException as error:  # a SystemExit would end the loop, and with it all conversations
            returned(None, error)
        else:
            returned(result, None)


def load_converse(name: str, options: Mapping[str, Any]) -> Converse:
    """Find the function and check that it can be called; nothing is called yet."""
    converse = Converse(name, import_callable(name, "rollout.converse"), options)
    try:
        signature = inspect.signature(converse.function)
    except ValueError:  # some functions written in C do not tell
        return converse
    try:
        signature.bind("prompt", "generate", **options)
    except TypeError as error:
        named = "".join(f", {key}=…" for key in options)
        shown = ", ".join(str(parameter) for parameter in signature.parameters.values())
        raise ConfigError(
            "MRL-1450",
            f"rollout.converse={name!r} cannot be called: {error}. "
            f"It is defined as {name.rpartition(':')[2]}({shown}).\n"
            f"Expected call: converse(prompt, generate{named}) -> number, Reward or None; plain or async.",
        ) from error
    return converse


def check_converse(name: str, options: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless the function can be imported and called. For `megarl check`."""
    load_converse(name, options)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to be awaited: an ``async def``, or an object whose ``__call__`` is one."""
    plain = inspect.unwrap(function)
    return inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None))  # noqa: B004


def outcome_of(name: str, result: Any) -> Reward | None:
    """What a conversation was worth by its own function's judgement; raises `DataError` if that is no number."""
    if result is None:
        return None
    value, scores = (result.value, result.scores) if isinstance(result, Reward) else (result, {})
    if not isinstance(scores, dict) or not all(isinstance(score, str) for score in scores):
        raise _wrong(name, scores, "scores must be numbers by name")
    for number in (value, *scores.values()):
        if not _is_finite(number):
            raise _wrong(name, number, "expected a finite number, a Reward or None")
    return Reward(float(value), {score: float(number) for score, number in scores.items()})


def _is_finite(value: Any) -> bool:
    """True and 0-d tensors are refused: they are usually a forgotten conversion."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _wrong(name: str, got: Any, expected: str) -> DataError:
    if inspect.iscoroutine(got):
        got.close()  # it would warn that it was never awaited
    try:
        shown = excerpt(repr(got))[1:-1]
    except Exception:  # a user's __repr__ may fail in any way
        shown = "an object that cannot be shown"
    return DataError("MRL-2152", f'converse "{name}" returned {shown} ({type(got).__name__}); {expected}')


def _answers(loop: LoopThread) -> bool:
    async def answer() -> None:
        """Nothing but being run."""

    alive: Future[None] = loop.submit(answer())
    try:
        alive.result(_SECONDS_TO_ANSWER)
    except TimeoutError:
        return False
    return True


def _nothing() -> None:
    """A thread cannot be cancelled."""
