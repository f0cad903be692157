"""The words of ``converse(prompt, generate)``: what a conversation's own function is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megarl.core.sample import Finish, Message

# what an environment says: text, a message, or several
Reply = str | Mapping[str, Any] | Sequence[Message]


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    """What the policy said when it was its turn.

    ``finish`` is "stop" if it ended its turn (or wrote a ``stop``) and "length" if a limit did. A conversation whose
    budget is used up gives an empty turn with "length".
    """

    text: str
    num_tokens: int
    finish: Finish
    # what the whole conversation may still have, the environment's words included
    num_tokens_left: int


class Generate(Protocol):
    """Lets the policy speak. The first call answers the prompt; later ones answer ``reply``, or, without one, go on.

    ``max_new_tokens`` limits this turn further than the configuration does. The turn also ends with the first of
    ``stop``, each of which must be one token; it stays in the text.
    """

    def __call__(
        self, reply: Reply | None = None, *, max_new_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> PolicyTurn:
        """Wait for the policy's turn. In an ``async def`` it is awaited: ``await generate(...)``."""


class AsyncGenerate(Protocol):
    """`Generate` for an ``async def``."""

    async def __call__(
        self, reply: Reply | None = None, *, max_new_tokens: int | None = None, stop: str | Sequence[str] = ()
    ) -> PolicyTurn:
        """Wait for the policy's turn."""


class OutOfBudget(Exception):
    """The function went on asking after an empty turn had told it that the conversation's budget is used up.

    If it leaves the function, the conversation ends there, without an outcome; it has not failed.
    """


class Abandoned(BaseException):
    """Nobody waits for this conversation any more: it took too long, or the run is over.

    Like a cancellation, it passes by ``except Exception``: a function that tries again and again must end too.
    """
