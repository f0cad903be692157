"""Prompts, samples and groups: what a rollout is made of.

All per-token arrays of a :class:`Sample` have one length and are aligned to the *token*: index ``t`` of a log-prob
array is the log-prob of token ``t`` given the tokens before it. Positions that the policy did not sample (the prompt,
tool output) have ``loss_mask`` 0 and log-prob 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Finish = Literal["stop", "length", "abort"]


# a turn of a conversation: "role" and "content", and what else a chat template reads
Message = Mapping[str, Any]


class Turn(NamedTuple):
    """A stretch of a conversation after the prompt: whose tokens they are, and their text."""

    speaker: Literal["policy", "environment"]
    text: str
    num_tokens: int


class VersionSpan(NamedTuple):
    """Weights ``version`` drew the response's tokens ``start`` to ``stop``, the latter excluded."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. ``demonstration`` is a worked answer, for supervised learning."""

    id: str
    text: str
    token_ids: NDArray[np.int64]
    answer: str | None = None
    demonstration: str | None = None
    task: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict)
    # what ``text`` was rendered from, if the row holds a conversation
    messages: tuple[Message, ...] = ()


@dataclass(slots=True)
class Sample:
    """One conversation of the policy about one prompt, and what it earned."""

    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.int8]
    rollout_logprobs: NDArray[np.float32]
    finish: Finish
    # what the policy said; of a conversation, all that was said after the prompt, one turn per line
    response: str = ""
    # of a conversation that a function led; empty for one answer
    turns: tuple[Turn, ...] = ()
    # of the oldest weights that drew any of it; ``spans`` says which drew what, and is empty if these drew all
    version: int = 0
    spans: tuple[VersionSpan, ...] = ()
    # the server that served it; empty for engines inside the ranks
    engine: str = ""
    # [tokens - 1, layers, experts per token]: where the engine's router sent each token, if it was asked (R3)
    routed_experts: NDArray[np.int32] | None = None
    seed: int = 0
    # What the reward function gave. None until scored; a failed reward never becomes a number.
    reward: float | None = None
    scores: dict[str, float] = field(default_factory=dict)
    # what a conversation's own function said that it was worth, for the reward "outcome"
    outcome: float | None = None
    # why there is no reward although it was asked for; empty if nothing failed
    failure: str = ""
    # The reward after normalisation and clipping, which is what is learned from; None until credited.
    shaped_reward: float | None = None
    # How much the sample counts in the policy's loss, relative to others.
    weight: float = 1.0
    # The scalar credit of `Algorithm.credit_groups`; spread over tokens later.
    advantage: float = 0.0

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if len(self.loss_mask) != length or len(self.rollout_logprobs) != length:
            raise ValueError(
                f"a sample's arrays must have one length: {length} tokens, "
                f"{len(self.loss_mask)} mask, {len(self.rollout_logprobs)} log-probs"
            )
        if length and self.loss_mask[0]:
            raise ValueError("the first token of a sample cannot be the policy's: no model predicts it")

    @property
    def num_response_tokens(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())


@dataclass(slots=True)
class Group:
    """One prompt and its samples. A group stays intact until packing: group baselines need it whole."""

    prompt: Prompt
    samples: list[Sample]
