"""Scoring of samples, as rollouts and evaluations see it."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.sample import Group
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups


class Scorer:
    """The rewards of a run, or of an evaluation set. Of the driver."""

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward

    def score(self, groups: Sequence[Group]) -> None:
        """Give every sample of the groups its ``reward`` and ``scores``."""
        score_groups(groups, self._reward)

    def close(self) -> None:
        """End what was started."""
        self._reward.close()
