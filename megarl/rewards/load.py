"""Rewards by name: built in, or ``"package.module:name"``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from megarl.core.errors import ConfigError
from megarl.core.importing import import_callable
from megarl.rewards.coin_flip import coin_flip
from megarl.rewards.conversation_outcome import outcome
from megarl.rewards.exact_match import exact_match
from megarl.rewards.reward import RewardFunction

BUILTINS: dict[str, Callable[..., Any]] = {"exact_match": exact_match, "coin_flip": coin_flip, "outcome": outcome}


def load_reward(name: str, options: Mapping[str, Any]) -> RewardFunction:
    """Find the function and check that it can be called with ``options``; nothing is called yet."""
    if ":" in name:
        function = import_callable(name, "reward")
    elif name in BUILTINS:
        function = BUILTINS[name]
    else:
        raise ConfigError(
            "MRL-1407",
            f'reward={name!r} is not known. Built in: {", ".join(BUILTINS)}.\nYour own: "package.module:name".',
        )
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
