"""Rewards on a scale that learning can rely on: normalised over a group, a step or the whole run, then clipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.algorithms.rewards import require_rewards
from megarl.config.algorithms import PolicyLossSettings
from megarl.core.protocols import Statistics
from megarl.core.sample import Group


def shaped_rewards(group: Group) -> NDArray[np.float64]:
    """What a group's samples are credited with."""
    assert all(sample.shaped_reward is not None for sample in group.samples), "rewards are shaped first"
    return np.array([sample.shaped_reward for sample in group.samples], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Moments:
    """Numbers by their count, their mean and their squared deviations from it."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> Moments:
        """The moments of these numbers."""
        if not len(numbers):
            return cls()
        mean = float(numbers.mean())
        return cls(float(len(numbers)), mean, float(np.square(numbers - mean).sum()))

    def merged(self, other: Moments) -> Moments:
        """Of both together (Chan et al., 1979), without a sum of large squares that would cancel."""
        if not other.count:
            return self
        count, shift = self.count + other.count, other.mean - self.mean
        squares = self.squares + other.squares + shift**2 * self.count * other.count / count
        return Moments(count, self.mean + shift * other.count / count, squares)

    def normalize(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Relative to the mean, in units of the sample deviation; equal rewards become 0."""
        deviation = np.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return np.asarray((rewards - self.mean) / (deviation + 1e-6), dtype=np.float64)


class RewardScale:
    """Shapes the rewards of one step after the other. Of the driver.

    "running" normalises over all rewards that were trained on since the run began, those of the step included; every
    reward counts the same, however old. That is its only state.
    """

    def __init__(self, settings: PolicyLossSettings) -> None:
        self._over = settings.normalize_rewards
        self._limit = settings.reward_clip
        self._seen = Moments()

    def shape(self, groups: Sequence[Group], meter: Statistics) -> None:
        """Set every sample's ``shaped_reward``: normalised, then clipped. Scores stay as they are."""
        rewards = [np.array(require_rewards(group), dtype=np.float64) for group in groups]
        if self._over == "group":
            rewards = [Moments.of(own).normalize(own) for own in rewards]
        elif self._over in ("batch", "running") and rewards:
            population = Moments.of(np.concatenate(rewards))
            if self._over == "running":
                population = self._seen = self._seen.merged(population)
            rewards = [population.normalize(own) for own in rewards]
        limit = self._limit
        for group, own in zip(groups, rewards, strict=True):
            num_clipped = 0 if limit is None else int((np.abs(own) > limit).sum())
            meter.mean("critic/reward_clip_frac", num_clipped, len(own))
            for sample, reward in zip(group.samples, own if limit is None else own.clip(-limit, limit), strict=True):
                sample.shaped_reward = float(reward)

    def state(self) -> dict[str, NDArray[np.float64]]:
        """What a checkpoint keeps."""
        seen = self._seen
        return {"rewards_seen": np.array([seen.count, seen.mean, seen.squares])} if seen.count else {}

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on where `state` was taken."""
        self._seen = Moments(*state["rewards_seen"].tolist()) if "rewards_seen" in state else Moments()
