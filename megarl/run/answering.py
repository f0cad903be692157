"""How a run's prompts are answered: in one turn, or in conversations."""

from __future__ import annotations

from megarl.config.schema import RunConfig
from megarl.core.world import World
from megarl.rollout.answering import Answering
from megarl.rollout.conversations import Conversations
from megarl.rollout.serving import Enter, Serving
from megarl.rollout.single_turn import SingleTurn
from megarl.rollout.talk import TalkLimits
from megarl.run.inputs import Inputs


def build_answering(config: RunConfig, inputs: Inputs, serving: Serving, enter: Enter, world: World) -> Answering:
    """What the settings ask for, by these engines."""
    own = config.rollout.converse if config.rollout else None
    if own is None:
        return SingleTurn(serving, inputs.tokenizer)
    limits = TalkLimits(own.max_turns, own.max_turn_tokens, own.tool_timeout_seconds)
    return Conversations(inputs.converse, serving, inputs.encoder, limits, enter, world)
