"""A conversation's function tried out without a model: the policy's lines are given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megarl.core.sample import Prompt
from megarl.rollout.conversation import OutOfBudget, PolicyTurn, Reply
from megarl.rollout.converse import is_async


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What the function returned, what it said to the policy, and how often it let the policy speak."""

    result: Any
    replies: list[Reply]
    num_turns: int


def rehearse(
    function: Callable[..., Any], prompt: str | Prompt, lines: Sequence[str], answer: str | None = None, **options: Any
) -> Rehearsal:
    """Call ``function`` with a policy that says ``lines``, one per turn. After the last one the budget is used up: an
    empty turn with finish "length", then `OutOfBudget`. A prompt may be its text, or whole, with all that its row has.

    It runs here and now, so that debuggers stop in it and exceptions come through.
    """
    turns = [*(PolicyTurn(line, len(line), "stop", 1000) for line in lines), PolicyTurn("", 0, "length", 0)]
    script = iter(turns)
    replies: list[Reply] = []
    num_turns = 0

    def generate(reply: Reply | None = None, **_: Any) -> PolicyTurn:
        nonlocal num_turns
        if reply is not None:
            replies.append(reply)
        turn = next(script, None)
        if turn is None:
            raise OutOfBudget("there are no more lines; end the conversation when a turn's finish is 'length'")
        num_turns += 1
        return turn

    async def generate_async(reply: Reply | None = None, **_: Any) -> PolicyTurn:
        return generate(reply)

    asked = prompt
    if isinstance(asked, str):
        asked = Prompt("rehearsal", asked, np.zeros(0, dtype=np.int64), answer)
    if is_async(function):
        result = asyncio.run(function(asked, generate_async, **options))
    else:
        result = function(asked, generate, **options)
    return Rehearsal(result, replies, num_turns)
