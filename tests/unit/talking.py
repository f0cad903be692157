"""A policy that can be scripted, in the place of engines, for tests of conversations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.core.protocols import Generation, GenerationRequest, SamplingParams, Statistics
from megarl.core.sample import Group, Prompt, Sample
from megarl.core.world import World
from megarl.data.encoder import PromptEncoder
from megarl.data.tokenizer import load_tokenizer
from megarl.metrics.meter import Meter
from megarl.rollout.answering import Questions, take_no_notice
from megarl.rollout.conversations import Conversations
from megarl.rollout.converse import Converse
from megarl.rollout.talk import TalkLimits

TOKENIZER = load_tokenizer("builtin:characters")
EOS = TOKENIZER.eos_token_id


def draw_at_random(request: GenerationRequest) -> tuple[list[int], str]:
    """Letters and now and then an end, all from the request's seed: what an engine does, without a model."""
    draw = np.random.default_rng(request.seed)
    ids: list[int] = []
    while len(ids) < request.params.max_new_tokens:
        ids.append(int(draw.integers(EOS, 12)))
        if ids[-1] in request.params.stop_token_ids:
            return ids, "stop"
    return ids, "length"


@dataclass
class ScriptedPolicy:
    """Serving whose draws are a function of the request."""

    speak: Callable[[GenerationRequest], tuple[list[int], str]] = draw_at_random
    rounds: list[list[GenerationRequest]] = field(default_factory=list)

    def generate(
        self, version: int, requests: Sequence[GenerationRequest], timer: str, meter: Meter, statistics: Statistics
    ) -> list[Generation]:
        self.rounds.append(list(requests))
        answers = []
        for request in requests:
            ids, finish = self.speak(request)
            logprobs = -(np.arange(len(ids), dtype=np.float32) + 1 + request.seed % 5)
            answers.append(Generation(request.id, np.array(ids), logprobs, finish, version))  # type: ignore[arg-type]
        return answers

    def report(self, statistics: Statistics) -> None: ...


def says(*texts: str) -> Callable[[GenerationRequest], tuple[list[int], str]]:
    """A policy that says these texts in turn, each with an end; its turn is the last part of the request's id."""

    def speak(request: GenerationRequest) -> tuple[list[int], str]:
        text = texts[int(request.id.rpartition("/")[2])]
        ids = [*TOKENIZER.encode(text).tolist(), EOS][: request.params.max_new_tokens]
        return ids, "stop" if ids[-1] in request.params.stop_token_ids else "length"

    return speak


@dataclass
class Setting:
    """Everything about conversations that a test may want to change."""

    max_new_tokens: int = 40
    max_turns: int = 16
    max_turn_tokens: int | None = None
    tool_timeout_seconds: float = 30.0
    max_in_flight: int = 64
    num_prompts: int = 2
    num_samples: int = 2
    encoder: PromptEncoder = field(default_factory=lambda: PromptEncoder(TOKENIZER))
    on_sample: Callable[[Prompt, Sample], None] = take_no_notice


def talk(
    world: World, function: Callable[..., Any], policy: ScriptedPolicy, setting: Setting, meter: Meter | None = None
) -> list[Group]:
    """The groups of conversations that ``function`` leads with the policy."""
    converse = Converse("test:converse", function, {})
    limits = TalkLimits(setting.max_turns, setting.max_turn_tokens, setting.tool_timeout_seconds)
    conversations = Conversations(
        converse, policy, setting.encoder, limits, lambda *_: nullcontext(), world, setting.max_in_flight
    )
    prompts = [Prompt(f"p{i}", f"{i}+1=", TOKENIZER.encode(f"{i}+1="), str(i + 1)) for i in range(setting.num_prompts)]
    params = SamplingParams(setting.max_new_tokens, stop_token_ids=TOKENIZER.stop_token_ids)
    questions = Questions("1", prompts, setting.num_samples, params, (7, "sampling", 1), setting.on_sample)
    meter = meter or Meter()
    try:
        (groups,) = conversations.answer([questions], 3, "timing_s/gen", meter, meter)
    finally:
        converse.close()
    return groups


def samples(groups: Sequence[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]
