"""A calculator for the policy: it writes ``47*86?`` and is told ``4042``."""

from __future__ import annotations

import re

from megarl.core.sample import Prompt
from megarl.rewards.reward import Reward
from megarl.rollout.conversation import Generate

CALL = "?"
_PRODUCT = re.compile(r"(\d{1,9})\*(\d{1,9})\?")


def converse(prompt: Prompt, generate: Generate) -> Reward:
    """Answer calls of the calculator until the policy says something else: that is its answer. 1 if it is right."""
    num_calls = 0
    turn = generate(stop=CALL)
    while turn.text.endswith(CALL):
        num_calls += 1
        turn = generate(calculate(turn.text), stop=CALL)
    return Reward(float(turn.text == prompt.answer), {"num_calls": num_calls})


def calculate(call: str) -> str:
    """What the calculator shows for ``47*86?``; it can multiply two numbers."""
    found = _PRODUCT.fullmatch(call)
    return f"{int(found[1]) * int(found[2])} " if found else "error "
