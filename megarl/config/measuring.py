"""What a run measures, under which names it reports it, and what its devices could do."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from megarl.config.section import Section, setting

View = Literal["all", "native", "roll", "verl", "trinity"]


def as_list(value: Any) -> Any:
    """``all`` is short for ``[all]``."""
    return [value] if isinstance(value, str) else value


Views = Annotated[list[View], BeforeValidator(as_list)]
_VIEW_RULE = "all, native, roll, verl or trinity, or a list of them"


class MetricsSettings(Section):
    """What is measured and how it is spelled. A view changes names, never values."""

    view: Views = setting(
        ["all"],
        "Names that trackers get: canonical ones and those of a dialect; all: every spelling.",
        rule=_VIEW_RULE,
        min_length=1,
    )
    view_per_sink: dict[Literal["console", "tensorboard", "wandb", "swanlab", "stdout_json"], Views] = setting(
        {},
        "Another view for one place where metrics go; the console's own is verl.",
        rule="a mapping from console, tensorboard, wandb, swanlab or stdout_json to a view",
    )
    memory: Literal["off", "summary", "device"] = setting(
        "device",
        "Memory around phases: of every device (above 16, trackers get summaries), always summaries, or off.",
    )
    phase_time: Literal["total", "full"] = setting(
        "full", "Seconds of a phase: all of them, or also moving states in, working, and moving states out."
    )
    detailed_stats: bool = setting(
        False, "Also the mean, std, max and min over prompts of every statistic of an evaluation."
    )
    best_of: Literal["exact", "bootstrap"] = setting(
        "exact", "best@k of an evaluation: the exact expectation, or 1000 draws with replacement as in other programs."
    )
    console_include: list[str] = setting(
        ["**"],
        "Metrics of the console line: `*` stands for a part of a name, `**` for any number of parts.",
        rule="a list of texts; it may be empty",
    )
    console_exclude: list[str] = setting(
        ["memory/**", "time/*/*/**", "alerts/**"],
        "Metrics that the console line leaves out.",
        rule="a list of texts; it may be empty",
    )


class MonitorSettings(Section):
    """What readers of Trinity-RFT's documents look for."""

    detailed_stats: bool = setting(False, "The same as metrics.detailed_stats, in Trinity-RFT's spelling.")


class HardwareSettings(Section):
    """What the devices could do at best."""

    peak_tflops: float | None = setting(
        None,
        "Peak of one device in 1e12 operations per second, for perf/mfu; null: known for common GPUs, measured on CPU.",
        gt=0,
        le=1e6,
    )
