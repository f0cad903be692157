"""Series of metrics for the tests of health rules, and what rules make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.alerts import AlertSettings
from megarl.config.health_rules import HEALTH_RULES
from megarl.metrics.health.alert import Severity
from megarl.metrics.health.health import Health

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Raised:
    """An alert and the step it came in."""

    step: int
    rule: str
    severity: Severity
    message: str


def only(rule: str, **changes: Any) -> AlertSettings:
    """Settings that switch every other rule off."""
    return AlertSettings(rules={other: {"enabled": False} for other in HEALTH_RULES if other != rule} | {rule: changes})


def raised(health: Health, series: Iterable[Metrics], first_step: int = 1) -> list[Raised]:
    """Every alert over a series of steps."""
    return [
        Raised(step, alert.rule, alert.severity, alert.message)
        for step, metrics in enumerate(series, first_step)
        for alert in health.check(step, metrics)
    ]


def of(name: str, *pieces: tuple[float, int]) -> list[dict[str, float]]:
    """One metric in pieces of (value, number of steps)."""
    return [{name: value} for value, count in pieces for _ in range(count)]


def together(*series: list[dict[str, float]], **constant: float) -> list[dict[str, float]]:
    """Several series step by step; ``constant`` metrics are in every step, with ``__`` for a slash."""
    fixed = {name.replace("__", "/"): value for name, value in constant.items()}
    return [
        {name: value for part in parts for name, value in part.items()} | fixed for parts in zip(*series, strict=True)
    ]


def numbers_in(value: Any) -> list[Any]:
    """Everything that an object remembers, in order: for comparing states and for counting."""
    if isinstance(value, (int, float, str, type(None))):
        return [value]
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in (key, *numbers_in(item))]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return [leaf for item in vars(value).values() for leaf in numbers_in(item)]
    if isinstance(value, Iterable):
        return [leaf for item in value for leaf in numbers_in(item)]
    return [repr(value)]


def state(health: Health) -> list[Any]:
    """What a health check knows; the cache of names is not knowledge."""
    return numbers_in({name: value for name, value in vars(health).items() if name != "_names"})
