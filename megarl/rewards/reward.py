"""The shape of rewards: what a user's function returns, and the function with its name and options."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reward:
    """The number to train on, and named scores that are only reported."""

    value: float
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function as the config names it. Only `rewards.score.score_groups` calls it."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    # One event loop for the whole run: a connection that an async reward keeps open stays usable in the next step.
    runner: asyncio.Runner = field(default_factory=asyncio.Runner, repr=False, compare=False)

    def close(self) -> None:
        """Give the event loop back. The function is not called again after this."""
        self.runner.close()
