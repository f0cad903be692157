"""What a sample is worth. A reward is ``reward(prompt, sample) -> float | Reward``, sync or async."""

from megarl.rewards.reward import Reward

__all__ = ["Reward"]
