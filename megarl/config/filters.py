"""Which groups a step trains on."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from megarl.config.names import FilterName, name_as_mapping
from megarl.config.section import REQUIRED, Section, setting


class FilterSettings(Section):
    """A filter. ``NAME`` is short for ``{name: NAME}``."""

    name: FilterName = setting(
        REQUIRED,
        "The filter.",
        rule='zero_variance, length, reward_range, or the import path of a function: "package.module:function"',
    )
    options: dict[str, Any] = setting({}, "What the filter is told.")

    @property
    def label(self) -> str:
        """What its metrics are called: a function's own name, without its module."""
        return self.name.rpartition(":")[2]


Filter = Annotated[FilterSettings, BeforeValidator(name_as_mapping)]
