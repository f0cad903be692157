"""Scoring of samples, as rollouts and evaluations see it."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.core.protocols import SampleScorer, Statistics
from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score_groups


class Scorer:
    """The rewards of a run, or of an evaluation set. ``reward`` is None if a model on the ranks scores."""

    def __init__(self, reward: RewardFunction | None) -> None:
        self._reward = reward
        self._model: SampleScorer | None = None

    def judge_with(self, model: SampleScorer) -> None:
        """Let the reward `model` be this model."""
        self._model = model

    def submit(self, prompt: Prompt, sample: Sample) -> None:
        """Begin to score a finished sample, in the background, while others are still being drawn."""

    def finish(self, groups: Sequence[Group], meter: Statistics) -> list[Group]:  # noqa: ARG002
        """Wait until every sample of the groups has its ``reward`` and ``scores``; what was not submitted is scored
        now. Gives the groups that the policy for failed rewards leaves, in their order. Collective.
        """
        if self._reward is not None:
            score_groups(groups, self._reward)
            return list(groups)
        assert self._model is not None, "built with the run"
        for group, values in zip(groups, self._model.score(groups), strict=True):
            for sample, value in zip(group.samples, values, strict=True):
                sample.reward = value
        return list(groups)

    def close(self) -> None:
        """End what was started."""
        if self._reward is not None:
            self._reward.close()
