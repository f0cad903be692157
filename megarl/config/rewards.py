"""How samples are scored."""

from __future__ import annotations

from typing import Any

from megarl.config.names import RewardName
from megarl.config.section import Section, setting


class RewardSettings(Section):
    """The reward function. ``reward: NAME`` is short for ``reward: {name: NAME}``."""

    name: RewardName = setting(
        "exact_match",
        "The reward function.",
        rule='exact_match, coin_flip, model, or the import path of a function: "package.module:function"',
    )
    options: dict[str, Any] = setting(
        {}, "Keyword arguments of the function. exact_match takes `after`: compare what follows the last such text."
    )
