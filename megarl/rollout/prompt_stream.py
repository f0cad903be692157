"""The driver's endless stream of prompts. Other ranks have none: they only lend their engines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from megarl.core.errors import DataError
from megarl.core.protocols import Statistics
from megarl.core.sample import Prompt
from megarl.data.cursor import Cursor
from megarl.data.mixture import Mixture
from megarl.data.prompts import PromptSource

logger = logging.getLogger(__name__)

TooLong = Literal["error", "skip"]
# one sentence that says why a prompt does not fit, or None
Measure = Callable[[Prompt], str | None]

_REMEDY = "Remove it, set data.too_long=skip, or change rollout.max_prompt_tokens, rollout.max_new_tokens or the model."


class PromptStream(Protocol):
    """Prompts, epoch after epoch."""

    @property
    def epoch(self) -> int:
        """Complete passes over the prompts."""

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""

    def report(self, meter: Statistics) -> None:
        """What happened since the last report."""


def why_no_room(prompt: Prompt, max_prompt_tokens: int) -> str | None:
    """A prompt that leaves no room for its answer cannot be used; it is never cut."""
    num_tokens = len(prompt.token_ids)
    if num_tokens <= max_prompt_tokens:
        return None
    return f"prompt {prompt.id!r} has {num_tokens} tokens; at most {max_prompt_tokens} leave room for the answer."


def refuse(problem: str) -> DataError:
    """The error for a prompt that is too long where none may be left out."""
    return DataError("MRL-2401", f"{problem}\n{_REMEDY}")


class SourceWalk:
    """One source, walked by its own cursor; prompts that are too long are left out or refused when their turn comes.

    ``name`` is what the user calls the source; ``task`` replaces that of the rows, if given.
    """

    def __init__(
        self,
        name: str,
        source: PromptSource,
        cursor: Cursor,
        measure: Measure,
        too_long: TooLong,
        task: str | None = None,
    ) -> None:
        self.num_left_out = 0
        self._name = name
        self._source = source
        self._cursor = cursor
        self._measure = measure
        self._too_long = too_long
        self._task = task
        self._has_warned = False

    @property
    def epoch(self) -> int:
        """Complete passes over the source."""
        return self._cursor.epoch

    def next(self) -> Prompt:
        """The next prompt that fits."""
        problem = None
        # from anywhere in an epoch to the end of the next, every row has had its turn
        for _ in range(2 * len(self._source)):
            (index,) = self._cursor.take(1)
            prompt = self._source[index]
            problem = self._measure(prompt)
            if problem is None:
                return prompt if self._task is None else replace(prompt, task=self._task)
            if self._too_long == "error":
                raise refuse(problem)
            self._leave_out(problem)
        raise DataError(
            "MRL-2014",
            f"{self._name}: not one of {len(self._source):,} prompts is short enough. {problem}\n"
            "Change rollout.max_prompt_tokens, rollout.max_new_tokens, the data or the model.",
        )

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"content_hash": self._source.content_hash, **self._cursor.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. That another content was accepted has been checked."""
        other_rows = state.get("content_hash") != self._source.content_hash
        if self._cursor.restore(state, other_rows=other_rows):
            logger.warning(
                "%s has %s rows, and had %s: epoch %d over the new ones begins.",
                self._name,
                f"{len(self._source):,}",
                f"{state['num_items']:,}",
                self.epoch + 1,
            )

    def _leave_out(self, problem: str) -> None:
        self.num_left_out += 1
        if not self._has_warned:
            logger.warning("%s: left out, and so will others be that are too long: %s", self._name, problem)
            self._has_warned = True


class MixedPrompts:
    """One or several sources in proportion to their weights. What is left out of a source is replaced from it."""

    def __init__(self, walks: Sequence[SourceWalk], weights: Sequence[float]) -> None:
        self._walks = walks
        self._mixture = Mixture(weights)

    @property
    def epoch(self) -> int:
        """How often every prompt of every source has had its turn at least."""
        return min(walk.epoch for walk in self._walks)

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts."""
        return [self._walks[self._mixture.draw()].next() for _ in range(num_prompts)]

    def report(self, meter: Statistics) -> None:
        """How many prompts were left out since the last report."""
        meter.sum("experience_pipeline/too_long_prompts", sum(walk.num_left_out for walk in self._walks))
        for walk in self._walks:
            walk.num_left_out = 0

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"num_drawn": self._mixture.state(), "sources": [walk.state() for walk in self._walks]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._mixture.restore(state["num_drawn"])
        for walk, own in zip(self._walks, state["sources"], strict=True):
            walk.restore(own)


class NoPrompts:
    """What ranks other than the driver draw from."""

    epoch = 0

    def draw(self, num_prompts: int) -> list[Prompt]:  # noqa: ARG002
        """Nothing."""
        return []

    def report(self, meter: Statistics) -> None:
        """Nothing."""
