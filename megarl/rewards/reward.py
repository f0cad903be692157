"""The shape of rewards: what a user's function returns, and the function with its name and options."""

from __future__ import annotations

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
    """A reward function as the config names it. Only `rewards.score` calls it."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
