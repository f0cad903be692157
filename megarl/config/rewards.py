"""Which rewards a sample gets: one or several, each with a label and a weight."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from megarl.config.names import IMPORT_PATH, REWARDS, RewardName, name_as_mapping
from megarl.config.section import Section, setting

_LABEL = r"^[A-Za-z0-9_-]([A-Za-z0-9._-]{0,78}[A-Za-z0-9_-])?$"


class RewardSettings(Section):
    """A reward function. ``reward: NAME`` is short for ``reward: {name: NAME}``; several are a list of either."""

    name: RewardName = setting(
        "exact_match",
        "The reward function.",
        rule=f'{", ".join(REWARDS)}, or the import path of a function: "package.module:function"',
    )
    label: str | None = setting(
        None,
        "What it is called in metrics: rollout/LABEL/mean; null: the function's name.",
        pattern=_LABEL,
        rule="text of at most 80 letters, digits, dots, dashes and underscores, or null",
    )
    weight: float = setting(
        1.0, "A sample's reward is the sum of weight x value over its rewards.", ge=-1e6, le=1e6, elsewhere="coef"
    )
    options: dict[str, Any] = setting(
        {}, "Keyword arguments of the function. docs/rewards.md lists those of the built-in ones."
    )

    @property
    def is_own(self) -> bool:
        """Whether the function is the user's."""
        return IMPORT_PATH.match(self.name) is not None

    @property
    def shown_label(self) -> str:
        """The label in metrics."""
        return self.label or self.name.rpartition(":")[2]


def as_list_of_mappings(value: Any) -> Any:
    """``NAME`` is short for ``[{name: NAME}]``, and a mapping for a list of one."""
    items = value if isinstance(value, list) else [value]
    return [name_as_mapping(item) for item in items]


Rewards = Annotated[list[RewardSettings], BeforeValidator(as_list_of_mappings)]
