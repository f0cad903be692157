"""What became of a call of a reward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megarl.core.errors import MegarlError
from megarl.rewards.reward import Reward
from megarl.rewards.score import MAX_SCORES, NAME

_KINDS = {"MRL-2102": "raised an exception", "MRL-2103": "returned no finite number"}
TOOK_TOO_LONG = "took too long"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no reward. ``kind`` is the same for failures that are alike; ``text`` is about this one."""

    kind: str
    text: str
    code: str

    def of(self, name: str) -> str:
        """The reason in one line."""
        told = self.text.split("\n")[0]
        return told if told.startswith("reward ") else f'reward "{name}" {self.kind}: {told}'

    @classmethod
    def of_time(cls, timeout_seconds: float) -> Failure:
        """For a sample that took too long."""
        return cls(TOOK_TOO_LONG, f"more than {timeout_seconds:g} seconds (scoring.timeout_seconds)", "MRL-2112")


# Nobody's fault: such a sample is scored elsewhere.
RELAY_IS_LOST = Failure("lost its worker", "the relay of its worker, or its machine, is gone", "MRL-5324")


def from_error(error: MegarlError) -> Failure:
    """What `rewards.score` raised."""
    return Failure(_KINDS.get(error.code, "failed"), str(error).removeprefix(f"{error.code} "), error.code)


def from_reply(reply: Any) -> Reward | Failure:
    """A worker's reply. It comes from a process that runs a user's code, so nothing about it is taken for granted."""
    if isinstance(reply, dict):
        value, scores = reply.get("value"), reply.get("scores")
        if value is not None and _is_number(value) and isinstance(scores, dict) and len(scores) <= MAX_SCORES:
            if all(NAME.fullmatch(name) and _is_number(score) for name, score in scores.items()):
                return Reward(value, scores)
        elif isinstance(reply.get("error"), str) and isinstance(reply.get("code"), str):
            code = reply["code"][:8]
            return Failure(_KINDS.get(code, "failed"), reply["error"], code)
    return Failure("broke the connection", "its worker sent something that is no reply", "MRL-2110")


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False
