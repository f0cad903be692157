"""The names that are built in, so that a misspelt one is found without importing what it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from megarl.config.reward_options import REWARD_OPTIONS

DATASETS = ("builtin:carry", "builtin:carry_held_out", "builtin:sort", "builtin:sort_held_out")
TOKENIZERS = ("builtin:characters",)
# reward -> the options that it takes
REWARDS: dict[str, tuple[str, ...]] = {name: tuple(kind.model_fields) for name, kind in REWARD_OPTIONS.items()}
# the reward that the model of the section reward_model gives
REWARD_MODEL = "model"
# filter of groups -> the options that it takes, and what each may be
FILTERS: dict[str, dict[str, str]] = {
    "zero_variance": {},
    "length": {"max_tokens": "a whole number >= 1", "drop": "samples or group"},
    "reward_range": {"low": "a number", "high": "a number"},
}
ALGORITHMS = ("grpo", "ppo", "sft")

IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*\Z", re.ASCII)


def _unknown(choices: tuple[str, ...]) -> PydanticCustomError:
    return PydanticCustomError("unknown_name", "unknown name", {"choices": list(choices)})


def _builtin_or_path(choices: tuple[str, ...]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if not name or (name.startswith("builtin:") and name not in choices):
            raise _unknown(choices)
        return name

    return check


def _builtin_or_import(choices: tuple[str, ...]) -> Callable[[str], str]:
    def check(name: str) -> str:
        if name not in choices and not IMPORT_PATH.match(name):
            raise _unknown(choices)
        return name

    return check


def name_as_mapping(value: Any) -> Any:
    """``NAME`` is short for ``{name: NAME}``."""
    return {"name": value} if isinstance(value, str) else value


DatasetName = Annotated[str, AfterValidator(_builtin_or_path(DATASETS))]
TokenizerName = Annotated[str, AfterValidator(_builtin_or_path(TOKENIZERS))]
RewardName = Annotated[str, AfterValidator(_builtin_or_import(tuple(REWARDS)))]
FilterName = Annotated[str, AfterValidator(_builtin_or_import(tuple(FILTERS)))]
AlgorithmPath = Annotated[str, AfterValidator(_builtin_or_import(()))]
ConversePath = Annotated[str, AfterValidator(_builtin_or_import(()))]
