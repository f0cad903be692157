"""Scoring of samples, as rollouts and evaluations see it."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.protocols import Statistics
from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups


class Scorer:
    """The rewards of a run, or of an evaluation set. Of the driver."""

    def __init__(self, reward: RewardFunction) -> None:
        self._reward = reward

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score a finished sample, in the background, while others are still being drawn."""

    def finish(self, groups: Sequence[Group], meter: Statistics) -> list[Group]:  # noqa: ARG002
        """Wait until every sample of the groups has its ``reward`` and ``scores``; what was not submitted is scored
        now. Gives the groups that the policy for failed rewards leaves, in their order.
        """
        score_groups(groups, self._reward)
        return list(groups)

    def close(self) -> None:
        """End what was started."""
        self._reward.close()
