"""The driver's endless stream of prompts. Other ranks have none: they only lend their engines."""

from __future__ import annotations

from typing import Protocol

from megarl.core.errors import DataError
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


def require_room(prompt: Prompt, max_prompt_tokens: int) -> None:
    """A prompt that leaves no room for its answer is the user's to mend, not to be cut in silence."""
    num_tokens = len(prompt.token_ids)
    if num_tokens > max_prompt_tokens:
        raise DataError(
            "MRL-2401",
            f"prompt {prompt.id!r} has {num_tokens} tokens; at most {max_prompt_tokens} leave room for the answer.\n"
            "Remove it, or change rollout.max_prompt_tokens, rollout.max_new_tokens or the model.",
        )


class ShuffledPrompts:
    """A source walked by a cursor."""

    def __init__(self, source: PromptSource, cursor: Cursor, max_prompt_tokens: int) -> None:
        self._source = source
        self._cursor = cursor
        self._max_prompt_tokens = max_prompt_tokens

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""
        return self._cursor.epoch

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        prompts = [self._source[index] for index in self._cursor.take(num_prompts)]
        for prompt in prompts:
            require_room(prompt, self._max_prompt_tokens)
        return prompts


class NoPrompts:
    """What ranks other than the driver draw from."""

    epoch = 0

    def draw(self, num_prompts: int) -> list[Prompt]:  # noqa: ARG002
        """Nothing."""
        return []
