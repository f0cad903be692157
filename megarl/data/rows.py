"""What makes a row of a data file a prompt, whatever the file's format."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megarl.core.errors import DataError
from megarl.core.sample import Message, Prompt
from megarl.data.encoder import PromptEncoder

PromptField = Literal["answer", "demonstration"]

ID, TASK = "id", "task"
# a whole number or a decimal fraction that is written with thousands separators
_GROUPED_NUMBER = re.compile(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Which key of a row holds what. ``id`` and ``task`` are called so; all other keys become the prompt's metadata.

    ``answer_after``: the reference answer is only what follows the last occurrence of this text in the value.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    demonstration: str = "demonstration"
    answer_after: str | None = None

    @property
    def all(self) -> tuple[str, ...]:
        """Every key that a row is checked for."""
        return (self.prompt, self.answer, self.demonstration, TASK, ID)


@dataclass(frozen=True, slots=True)
class RowRules:
    """What makes a row good."""

    keys: PromptKeys
    encoder: PromptEncoder
    required: frozenset[PromptField] = frozenset()


class Row(NamedTuple):
    """A good row, not yet encoded. ``id`` is None unless the row gives one."""

    id: str | None
    content: str | tuple[Message, ...]
    answer: str | None
    demonstration: str | None
    task: str
    metadata: dict[str, Any]

    def to_prompt(self, place: str, encoder: PromptEncoder) -> Prompt:
        """``place`` is the id of a row that gives none."""
        try:
            token_ids = encoder.encode(self.content)
        except DataError as error:  # a chat template has its own ideas of what a conversation is
            raise DataError(error.code, f"{place}: {str(error).removeprefix(error.code).lstrip()}") from error
        prompt = Prompt(
            id=self.id if self.id is not None else place,
            text=self.content if isinstance(self.content, str) else as_text(self.content),
            token_ids=token_ids,
            answer=self.answer,
            demonstration=self.demonstration,
            task=self.task,
            metadata=self.metadata,
        )
        return prompt if isinstance(self.content, str) else replace(prompt, messages=self.content)


class BadRow(Exception):
    """What is wrong with a row, or with the value of one of its keys."""

    def __init__(self, what: str, key: str = "") -> None:
        super().__init__(what)
        self.key = key


def read_row(row: dict[str, Any], rules: RowRules) -> Row:
    """A row as its file's format gives it. Raises `BadRow` for the first thing that is wrong with it."""
    keys = rules.keys
    content = _content(row, rules)
    answer = _text_or_number(row, keys.answer)
    if answer is None and "answer" in rules.required:
        raise BadRow("is missing, and this run needs it", keys.answer)
    demonstration = row.get(keys.demonstration)
    if demonstration is not None:
        _require_text(demonstration, keys.demonstration, rules)
    elif "demonstration" in rules.required:
        raise BadRow("is missing, and this run needs it", keys.demonstration)
    task = row.get(TASK)
    if task is not None and not isinstance(task, str):
        raise BadRow(f"must be a string, not {type_name(task)}", TASK)
    explicit_id = _text_or_number(row, ID)
    metadata = {key: value for key, value in row.items() if key not in keys.all}
    if answer is not None and keys.answer_after is not None:
        metadata[keys.answer] = answer
        answer = _final_answer(answer, keys.answer_after, keys.answer)
    return Row(explicit_id, content, answer, demonstration, task or "default", metadata)


def as_text(messages: tuple[Message, ...]) -> str:
    """A conversation as people read it."""
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def type_name(value: object) -> str:
    """What JSON calls the type of a value."""
    if value is None:
        return "null"
    names = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")


def _content(row: dict[str, Any], rules: RowRules) -> str | tuple[Message, ...]:
    key = rules.keys.prompt
    if key not in row:
        raise BadRow("is missing", key)
    value = row[key]
    if isinstance(value, list):
        return _messages(value, key, rules)
    if not isinstance(value, str):
        raise BadRow(f"must be a string or a list of messages, not {type_name(value)}", key)
    _require_text(value, key, rules)
    if not value.strip():
        raise BadRow("is empty", key)
    return value


def _messages(messages: list[Any], key: str, rules: RowRules) -> tuple[Message, ...]:
    if not messages:
        raise BadRow("is an empty list of messages", key)
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            raise BadRow(f"has a message {number} that is not an object but {type_name(message)}", key)
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise BadRow(f'has a message {number} without a "role" (such as user)', key)
        if content is None and message.get("tool_calls"):  # the one kind of message that may say nothing
            continue
        if not isinstance(content, str):
            raise BadRow(f'has a message {number} whose "content" is {type_name(content)}, not a string', key)
        _require_text(content, key, rules)
    if messages[-1]["role"] == "assistant":
        raise BadRow("ends with a message of the assistant: there is nothing to answer", key)
    if not any((message.get("content") or "").strip() for message in messages):
        raise BadRow("has only empty messages", key)
    return tuple(messages)


def _require_text(value: Any, key: str, rules: RowRules) -> None:
    """A string that the tokenizer can encode."""
    if not isinstance(value, str):
        raise BadRow(f"must be a string, not {type_name(value)}", key)
    problem = rules.encoder.tokenizer.why_not_encodable(value)
    if problem is not None:
        raise BadRow(f"cannot be encoded. {problem}", key)


def _text_or_number(row: dict[str, Any], key: str) -> str | None:
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadRow(f"must be a string or a number, not {type_name(value)}", key)
    return str(value)


def _final_answer(text: str, marker: str, key: str) -> str:
    """What follows the last ``marker``. A number that is all of it loses its thousands separators."""
    _, found, after = text.rpartition(marker)
    answer = after.strip()
    if not found:
        raise BadRow(f'has no "{marker}" (data.answer_after)', key)
    if not answer:
        raise BadRow(f'has nothing after its last "{marker}" (data.answer_after)', key)
    return answer.replace(",", "") if _GROUPED_NUMBER.fullmatch(answer) else answer
