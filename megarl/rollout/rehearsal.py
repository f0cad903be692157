"""A conversation's function tried out without a model: the policy's lines are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.sample import Prompt
from megarl.rollout.conversation import PolicyTurn, Reply
from megarl.rollout.converse import is_async


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the function returned, and what it said to the policy."""

    result: Any
    replies: list[Reply]


def rehearse(
    function: Callable[..., Any], prompt: str, lines: Sequence[str], answer: str | None = None, **options: Any
) -> Rehearsal:
    """Call ``function`` with a policy that says ``lines``, one per turn. After the last one it has nothing to say:
    an empty turn with finish "length", as at the end of a budget.

    It runs here and now, so that debuggers stop in it and exceptions come through.
    """
    script = iter(lines)
    replies: list[Reply] = []

    def generate(reply: Reply | None = None, **_: Any) -> PolicyTurn:
        if reply is not None:
            replies.append(reply)
        text = next(script, None)
        return PolicyTurn("", 0, "length", 0) if text is None else PolicyTurn(text, len(text), "stop", 1000)

    async def generate_async(reply: Reply | None = None, **_: Any) -> PolicyTurn:
        return generate(reply)

    asked = Prompt("rehearsal", prompt, np.zeros(0, dtype=np.int64), answer)
    if is_async(function):
        return Rehearsal(asyncio.run(function(asked, generate_async, **options)), replies)
    return Rehearsal(function(asked, generate, **options), replies)
