"""How each place where metrics go wants them: under which names, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from megarl.config.schema import RunConfig
from megarl.trackers.views import Spelling

Sink = Literal["console", "tensorboard", "wandb", "swanlab", "stdout_json"]

# Dashboards make a group of charts of every first part of a name, in the order in which they first see it.
GROUPS = (
    "critic", "actor", "eval", "val", "rollout", "response_length", "response", "prompt_length", "tokens", "training",
    "user", "timing_s", "timing_per_token_ms", "perf", "system", "experience_pipeline", "weights", "mismatch",
    "time", "memory",
)  # fmt: skip
_OTHERS = GROUPS.index("timing_s")
_FIRST_CHARTS = "critic/score/"
_MAX_NAME = 255


def spelling_for(config: RunConfig, sink: Sink) -> Spelling:
    """The spelling that the configuration asks for."""
    views = config.metrics.view_per_sink.get(sink, config.metrics.view)
    return Spelling(views, memory=config.metrics.memory)


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Scores first, then the actor, ..., and the many times and memories last. Names that a dashboard changes fail."""
    for name in metrics:
        assert 0 < len(name) <= _MAX_NAME and name == name.strip("/. "), f"{name!r} is not a name for every dashboard"
    return {name: metrics[name] for name in sorted(metrics, key=_place)}


def _place(name: str) -> tuple[int, bool, str]:
    group = name.partition("/")[0]
    number = GROUPS.index(group) if group in GROUPS else _OTHERS
    return number, not name.startswith(_FIRST_CHARTS), name


def number_for_json(value: float) -> float | str:
    """JSON has no NaN: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``."""
    if value != value:
        return "NaN"
    return value if abs(value) != float("inf") else ("Infinity" if value > 0 else "-Infinity")


def number_from_json(value: object) -> float:
    """The inverse of `number_for_json`."""
    return value if isinstance(value, (int, float)) else float(cast(str, value))
