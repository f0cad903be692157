"""The tokens of a conversation, exactly as they were given and drawn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megarl.core.protocols import Generation
from megarl.core.sample import Finish, Sample, Turn
from megarl.rollout.drafts import join


class Transcript:
    """A prompt, then turns of the environment and the policy. Nothing is ever decoded and encoded again.

    The last token is always the policy's, or the prompt's: what the environment said last is of no use if nobody
    answers. At most ``max_new_tokens`` follow the prompt.
    """

    def __init__(self, prompt_ids: NDArray[np.int64], max_new_tokens: int) -> None:
        self._ids = prompt_ids
        self._mask = np.zeros(len(prompt_ids), dtype=np.int8)
        self._max_tokens = len(prompt_ids) + max_new_tokens
        # all that the policy said, as if it had said it at once
        self._drawn: Generation | None = None
        self._turns: list[Turn] = []
        self.finish: Finish = "length"

    @property
    def num_policy_turns(self) -> int:
        """How often the policy spoke."""
        return sum(turn.speaker == "policy" for turn in self._turns)

    @property
    def room(self) -> int:
        """Tokens that may follow."""
        return self._max_tokens - len(self._ids)

    @property
    def last_token(self) -> int:
        """The token that everything ends with so far."""
        return int(self._ids[-1])

    def with_reply(self, reply_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """What the policy answers to: everything so far, and the reply."""
        return np.concatenate([self._ids, reply_ids]) if len(reply_ids) else self._ids

    def add(self, reply: str, asked: NDArray[np.int64], generation: Generation, text: str) -> None:
        """The policy answered ``generation``, which reads ``text``, to ``asked``: everything so far, and a reply."""
        num_reply, num_drawn = len(asked) - len(self._ids), len(generation.token_ids)
        if num_reply:
            self._turns.append(Turn("environment", reply, num_reply))
        self._turns.append(Turn("policy", text, num_drawn))
        self._ids = np.concatenate([asked, generation.token_ids])
        marks = np.repeat(np.array([0, 1], dtype=np.int8), [num_reply, num_drawn])
        self._mask = np.concatenate([self._mask, marks])
        self.finish = generation.finish
        if self._drawn is None:
            self._drawn = generation
        else:
            # turns may have been served by different servers: then the sample is nobody's alone
            engine = generation.engine if generation.engine == self._drawn.engine else ""
            self._drawn = replace(join(self._drawn, generation), engine=engine)

    def sample(self, seed: int) -> Sample:
        """The conversation so far."""
        logprobs = np.zeros(len(self._ids), dtype=np.float32)
        drawn = self._drawn
        if drawn is not None:
            logprobs[self._mask == 1] = drawn.logprobs
        return Sample(
            token_ids=self._ids,
            loss_mask=self._mask,
            rollout_logprobs=logprobs,
            finish=self.finish,
            response="\n".join(turn.text for turn in self._turns),
            turns=tuple(self._turns),
            version=drawn.version if drawn is not None else 0,
            spans=drawn.spans if drawn is not None else (),
            engine=drawn.engine if drawn is not None else "",
            routed_experts=drawn.routed_experts if drawn is not None else None,
            seed=seed,
        )
