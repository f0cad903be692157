"""What every section of the schema has in common, and how a setting is declared."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """Frozen and strict: unknown keys, text for numbers and non-finite numbers are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)


REQUIRED: Any = ...


def setting(default: Any, description: str, *, rule: str = "", elsewhere: str = "", **limits: Any) -> Any:
    """A setting with its default (or `REQUIRED`), its description and its limits (``ge``, ``gt``, ``le``, ``lt``, ...).

    ``rule`` replaces the generated words for what is allowed. ``elsewhere`` lists names that other programs use for the
    same thing; whoever writes one of them is told ours.
    """
    extra: dict[str, Any] = {"rule": rule, "elsewhere": elsewhere.split()}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def section(kind: type[Section], description: str) -> Any:
    """A section that may be left out: all its settings have defaults."""
    return Field(default_factory=kind, description=description)
