"""Rewards by name: built in, or ``"package.module:name"``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from megarl.core.errors import ConfigError
from megarl.core.importing import import_callable
from megarl.rewards.reward import RewardFunction

# "worker": in limited processes. "driver": in the driver itself, for our own code only: functions that are done in
# microseconds, and async ones that need secrets.
Place = Literal["worker", "driver"]


class BuiltIn(NamedTuple):
    """Where a built-in function is, imported only when it is used, and where it runs."""

    path: str
    place: Place


BUILTINS: dict[str, BuiltIn] = {
    "exact_match": BuiltIn("megarl.rewards.exact_match:exact_match", "driver"),
    "math_answer": BuiltIn("megarl.rewards.math_answer:math_answer", "worker"),
    "format": BuiltIn("megarl.rewards.format:has_format", "worker"),
    "length": BuiltIn("megarl.rewards.length:length", "driver"),
    "code": BuiltIn("megarl.rewards.code:code", "worker"),
    "remote": BuiltIn("megarl.rewards.remote:remote", "driver"),
    "judge": BuiltIn("megarl.rewards.judge:judge", "driver"),
    "outcome": BuiltIn("megarl.rewards.conversation_outcome:outcome", "driver"),
    "coin_flip": BuiltIn("megarl.rewards.coin_flip:coin_flip", "driver"),
}


def place_of(name: str) -> Place:
    """Where the reward runs; everything of the user's does in workers."""
    return BUILTINS[name].place if name in BUILTINS else "worker"


def load_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Import the function and check that it can be called with ``options``; nothing is called yet."""
    if ":" not in name and name not in BUILTINS:
        raise ConfigError(
            "MRL-1407",
            f'reward={name!r} is not known. Built in: {", ".join(BUILTINS)}.\nYour own: "package.module:name".',
        )
    function = import_callable(BUILTINS[name].path if name in BUILTINS else name, "reward")
    reward = RewardFunction(name, function, options)
    check_reward(reward)
    return reward


def check_reward(reward: RewardFunction) -> None:
    """Raise ConfigError unless the function accepts a prompt, a sample and the options by name."""
    try:
        signature = inspect.signature(reward.function)
    except ValueError:  # some functions written in C do not tell
        return
    try:
        signature.bind("prompt", "sample", **reward.options)
    except TypeError as error:
        options = "".join(f", {key}=…" for key in reward.options)
        raise ConfigError(
            "MRL-1408",
            f'reward "{reward.name}" cannot be called: {error}. It is defined as {_shown(reward.name, signature)}.\n'
            f"Expected call: reward(prompt, sample{options}) -> number or Reward.",
        ) from error


def _shown(name: str, signature: inspect.Signature) -> str:
    return f"{name.rpartition(':')[2]}({', '.join(str(parameter) for parameter in signature.parameters.values())})"
