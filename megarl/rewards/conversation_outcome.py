"""What the conversation's own function said that the sample was worth."""

from __future__ import annotations

from megarl.core.errors import DataError
from megarl.core.sample import Prompt, Sample


def outcome(prompt: Prompt, sample: Sample) -> float:
    """``Sample.outcome`` as `converse` set it."""
    if sample.outcome is None:
        raise DataError(
            "MRL-2183",
            f'reward "outcome": the conversation about prompt {prompt.id!r} gave no outcome.\n'
            "Let your converse function set one on every sample that it returns, or use another reward.",
        )
    return sample.outcome
