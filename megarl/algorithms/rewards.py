"""What algorithms do with rewards: insist on them, report them, and take the KL penalty from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from megarl.config.algorithms import KlSettings
from megarl.core.batch import MicroBatch
from megarl.core.protocols import Statistics
from megarl.core.sample import Group
from megarl.ops.kl import kl_estimate


def require_rewards(group: Group) -> list[float]:
    """The rewards of a group. An unscored sample is a bug upstream, never a zero."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    assert len(rewards) == len(group.samples), f"group {group.prompt.id} has samples without a reward"
    return rewards


def report_groups(groups: Sequence[Group], meter: Statistics) -> None:
    """Scores over samples, and how much groups differ within."""
    for group in groups:
        rewards = np.array(require_rewards(group))
        meter.mean("critic/score/mean", float(rewards.sum()), len(rewards))
        meter.max("critic/score/max", float(rewards.max()))
        meter.min("critic/score/min", float(rewards.min()))
        prefix = "experience_pipeline/group_advantages"
        spread = float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0
        for name, value in ((f"{prefix}/reward_mean", float(rewards.mean())), (f"{prefix}/reward_std", spread)):
            meter.mean(f"{name}/mean", value, 1)
            meter.max(f"{name}/max", value)
            meter.min(f"{name}/min", value)
        if len(rewards) > 1:
            meter.mean("rollout/zero_variance_group_ratio", float(rewards.max() == rewards.min()), 1)


def token_penalty(kl: KlSettings) -> Callable[[MicroBatch], torch.Tensor]:
    """What each token pays for leaving the reference: ``coef * KL`` of the policy that generated it, or nothing."""

    def nothing(micro: MicroBatch) -> torch.Tensor:
        return torch.zeros_like(micro.loss_mask)

    def penalty(micro: MicroBatch) -> torch.Tensor:
        assert micro.old_logprobs is not None and micro.ref_logprobs is not None
        return kl.coef * kl_estimate(micro.old_logprobs, micro.ref_logprobs, kl.estimator) * micro.loss_mask

    return penalty if kl.coef > 0 and kl.apply_to == "reward" else nothing


def report_rewards(micro: MicroBatch, penalty: torch.Tensor, meter: Statistics) -> None:
    """What sequences earned in the end: the score less the KL penalty of all their tokens."""
    real = micro.sample_index >= 0
    paid = torch.zeros_like(micro.rewards).index_add_(0, micro.sequence_of_token, penalty)
    shaped = (micro.rewards - paid)[real]
    if shaped.numel():
        meter.mean("critic/rewards/mean", shaped.sum(), shaped.numel())
        meter.max("critic/rewards/max", shaped.max())
        meter.min("critic/rewards/min", shaped.min())
