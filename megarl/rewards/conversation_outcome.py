"""The reward of conversations: what their own function said that they were worth."""

from __future__ import annotations

from megarl.core.errors import DataError
from megarl.core.sample import Prompt, Sample
from megarl.rewards.reward import Reward


def outcome(prompt: Prompt, sample: Sample) -> Reward:
    """The number that ``converse`` returned, with its named scores."""
    if sample.outcome is None:
        raise DataError(
            "MRL-2183",
            f"the conversation about prompt {prompt.id!r} has no outcome: its function returned None, or "
            "went on asking when the budget was used up.\n"
            "Return a number from rollout.converse, or use another reward.",
        )
    return Reward(sample.outcome, dict(sample.scores))
