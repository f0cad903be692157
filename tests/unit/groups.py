"""Hand-made groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megarl.core.sample import Finish, Group, Prompt, Sample


def sample_with(reward: float | None, num_tokens: int = 3, finish: Finish = "stop", response: str = "") -> Sample:
    """A scored answer of ``num_tokens`` tokens to a prompt of two."""
    return Sample(
        token_ids=np.arange(2 + num_tokens),
        loss_mask=np.repeat(np.array([0, 1], dtype=np.int8), [2, num_tokens]),
        rollout_logprobs=np.zeros(2 + num_tokens, dtype=np.float32),
        finish=finish,
        reward=reward,
        response=response,
    )


def group_with(samples: Sequence[Sample], name: str = "0", text: str = "?") -> Group:
    """The group of these samples."""
    return Group(Prompt(name, text, np.array([0, 1])), list(samples))
