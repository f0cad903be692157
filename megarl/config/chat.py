"""How questions and conversations are put to the model."""

from __future__ import annotations

import datetime
from typing import Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from megarl.config.section import Section, setting

# what megarl itself gives to a template
RESERVED_OPTIONS = ("messages", "add_generation_prompt")
_DATE_RULE = "a date such as 2026-01-31, or null"


def _iso_date(value: str | None) -> str | None:
    try:
        if value is not None:
            datetime.date.fromisoformat(value)
    except ValueError:
        raise PydanticCustomError("not_a_date", "not a date") from None
    return value


class ChatSettings(Section):
    """How questions and conversations are put to the model."""

    template: str = setting(
        "auto",
        "The chat template: auto takes the tokenizer's, or plain text if it has none; none: always plain text; "
        "anything else is a Jinja file.",
        min_length=1,
        rule="auto, none, or the path of a Jinja file",
        elsewhere="chat_template apply_chat_template custom_chat_template chat_template_path",
    )
    system: str | None = setting(
        None,
        "System prompt of every conversation that does not begin with its own; null: none.",
        min_length=1,
        elsewhere="system_prompt",
    )
    options: dict[str, Any] = setting(
        {},
        "Variables that the template reads, such as enable_thinking: false or tools: [...].",
        rule="a mapping",
        elsewhere="chat_template_kwargs apply_chat_template_kwargs",
    )
    date: Annotated[str | None, AfterValidator(_iso_date)] = setting(
        None,
        "What a template that asks for today's date is told: a run must not change at midnight. null: nothing.",
        rule=_DATE_RULE,
    )
