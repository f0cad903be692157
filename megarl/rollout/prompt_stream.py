"""The driver's endless stream of prompts. Other ranks have none: they only lend their engines."""

from __future__ import annotations

from typing import Protocol

from megarl.core.sample import Prompt
from megarl.data.cursor import Cursor
from megarl.data.prompts import PromptSource


class PromptStream(Protocol):
    """Prompts, epoch after epoch."""

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""


class ShuffledPrompts:
    """A source walked by a cursor."""

    def __init__(self, source: PromptSource, cursor: Cursor) -> None:
        self._source = source
        self._cursor = cursor

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""
        return self._cursor.epoch

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        return [self._source[index] for index in self._cursor.take(num_prompts)]


class NoPrompts:
    """What ranks other than the driver draw from."""

    epoch = 0

    def draw(self, num_prompts: int) -> list[Prompt]:  # noqa: ARG002
        """Nothing."""
        return []
