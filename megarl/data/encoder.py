"""How a row's prompt becomes tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megarl.core.sample import Message
from megarl.data.tokenizer import Tokenizer


class PromptEncoder:
    """A prompt is a text, or messages; with a chat template, both go through it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, content: str | Sequence[Message]) -> NDArray[np.int64]:
        """Token ids of a whole prompt, up to where the policy begins. No control token comes from the content."""
        if not isinstance(content, str):
            raise NotImplementedError("messages need a chat template")
        return self.tokenizer.encode(content)

    def encode_reply(self, content: str | Sequence[Message], *, turn_ended: bool) -> NDArray[np.int64]:  # noqa: ARG002
        """Token ids of what is said to the policy after its turn, up to where it begins again.

        ``turn_ended``: whether the policy itself ended its turn, with a token for that.
        """
        return self.encode(content)
