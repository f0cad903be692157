"""When and on what the policy is evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from megarl.config.data import DATA_RULE
from megarl.config.names import DatasetName
from megarl.config.rewards import Rewards
from megarl.config.section import REQUIRED, Section, setting

_MANY = 1_000_000_000
_SET_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,98}[A-Za-z0-9_-])?"
_SET_NAME = rf"^{_SET_PART}(/{_SET_PART}){{0,3}}$"


class EvalSetSettings(Section):
    """One set of prompts to evaluate on, under a name of your choice."""

    data: DatasetName = setting(REQUIRED, "The prompts.", rule=DATA_RULE)
    num_samples: int = setting(1, "Samples per prompt (the k of best-of-k).", ge=1, le=100_000, elsewhere="n k")
    temperature: float = setting(0.0, "Sampling temperature; 0: the likeliest token.", ge=0, le=100)
    top_p: float | None = setting(
        None,
        "Sample from the smallest set of tokens with this probability; 1: off; null: like rollout.top_p.",
        gt=0,
        le=1,
    )
    top_k: int | None = setting(
        None,
        "Sample from this many of the likeliest tokens; 0: off; null: like rollout.top_k.",
        ge=0,
        le=_MANY,
    )
    max_new_tokens: int | None = setting(
        None,
        "Longest response; longer ones are cut; null: like rollout.max_new_tokens.",
        ge=1,
        le=_MANY,
        elsewhere="max_tokens response_length max_response_length",
    )
    max_prompts: int = setting(256, "Only the first prompts of the set, at most so many.", ge=1, le=_MANY)
    reward: Rewards | None = setting(
        None,
        "How answers are scored; null: like training samples.",
        min_length=1,
        rule="a name, a mapping or a list, as in `reward`, or null",
    )


class EvalSettings(Section):
    """When and on what the policy is evaluated."""

    every: int = setting(
        0,
        "Steps between evaluations; 0: none in between.",
        ge=0,
        le=_MANY,
        elsewhere="eval_interval test_freq",
    )
    before_training: bool = setting(True, "Evaluate before the first step.", elsewhere="val_before_train")
    at_end: bool = setting(True, "Evaluate after the last step.")
    sets: dict[Annotated[str, StringConstraints(pattern=_SET_NAME)], EvalSetSettings] = setting(
        {}, "The sets, by name.", rule="a mapping from names of sets to their settings"
    )
    bench_sets: dict[Annotated[str, StringConstraints(pattern=_SET_NAME)], EvalSetSettings] = setting(
        {},
        "Sets that are evaluated once, after the last step; reported under bench/.",
        rule="a mapping from names of sets to their settings",
    )
