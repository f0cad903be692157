"""How each place where metrics go wants them: under which names, and in which order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megarl.config.phases import measured_phases
from megarl.config.schema import RunConfig
from megarl.metrics.across import MAX_DEVICES_SHOWN
from megarl.trackers.views import Spelling

Sink = Literal["console", "tensorboard", "wandb", "swanlab", "stdout_json"]

# Dashboards make a group of charts of every first part of a name, in the order in which they first see it.
GROUPS = (
    "critic", "actor", "eval", "bench", "val", "val-core", "rollout", "sample", "response_length", "response",
    "prompt_length", "tokens", "alerts", "training", "user", "timing_s", "timing_per_token_ms", "perf", "system",
    "experience_pipeline", "weights", "mismatch", "global_seqlen", "time", "memory",
)  # fmt: skip
_OTHERS = GROUPS.index("timing_s")
_FIRST_CHARTS = "critic/score/"
_MAX_NAME = 255


def spelling_for(config: RunConfig, sink: Sink) -> Spelling:
    """The spelling that the configuration asks for."""
    usual = ["verl"] if sink == "console" else config.metrics.view
    views = config.metrics.view_per_sink.get(sink, usual)
    max_devices = 0 if config.metrics.memory == "summary" else MAX_DEVICES_SHOWN
    return Spelling(views, measured_phases(config), max_devices)


def in_order(metrics: Mapping[str, float]) -> dict[str, float]:
    """Scores first, then the actor, ..., and the many times and memories last. Names that a dashboard changes fail."""
    for name in metrics:
        assert 0 < len(name) <= _MAX_NAME and name == name.strip("/. "), f"{name!r} is not a name for every dashboard"
    return {name: metrics[name] for name in sorted(metrics, key=_place)}


def _place(name: str) -> tuple[int, bool, str]:
    group = name.partition("/")[0]
    number = GROUPS.index(group) if group in GROUPS else _OTHERS
    return number, not name.startswith(_FIRST_CHARTS), name
