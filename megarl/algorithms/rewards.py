"""What algorithms do with rewards: insist on them, weigh samples by them, charge tokens for a KL, and report them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.config.algorithms import KlSettings, PolicyLossSettings
from megarl.core.batch import MicroBatch
from megarl.core.protocols import Statistics
from megarl.core.sample import Group, Sample
from megarl.ops.kl import kl_estimate


def require_rewards(group: Group) -> list[float]:
    """The rewards of a group. An unscored sample is a bug upstream, never a zero."""
    rewards = [sample.reward for sample in group.samples if sample.reward is not None]
    assert len(rewards) == len(group.samples), f"group {group.prompt.id} has samples without a reward"
    return rewards


def weigh_samples(groups: Sequence[Group], settings: PolicyLossSettings, meter: Statistics) -> None:
    """Set every sample's ``weight``, before it is scaled to mean 1 over an optimizer step.

    As in ROLL, a prompt of difficulty d in [0, 1] gives 0.5 + 1.5 d, and a response of a share s of the step's longest
    one 1.5 - s. Difficulty is the share of the prompt's samples that score 0 or less.
    """
    longest = max((sample.num_response_tokens for group in groups for sample in group.samples), default=0)
    for group in groups:
        difficulty = float(np.mean([reward <= 0 for reward in require_rewards(group)])) if group.samples else 0.0
        for sample in group.samples:
            sample.weight = 1.0
            if "difficulty" in settings.weight_samples_by:
                sample.weight *= 0.5 + 1.5 * difficulty
            if "length" in settings.weight_samples_by:
                sample.weight *= 1.5 - sample.num_response_tokens / max(1, longest)
            meter.mean("actor/sample_weights_mean", sample.weight, 1)
            meter.min("actor/sample_weights_min", sample.weight)
            meter.max("actor/sample_weights_max", sample.weight)


def report_groups(groups: Sequence[Group], meter: Statistics) -> None:
    """Scores over samples, and how much groups differ within."""
    for group in groups:
        rewards = np.array(require_rewards(group))
        _report_scores("critic/score", rewards, meter)
        _report_scores("critic/score_non_aborted", rewards[[_is_whole(sample) for sample in group.samples]], meter)
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
    """What sequences earned in the end: the shaped reward less the KL penalty of all their tokens."""
    real = micro.sample_index >= 0
    paid = torch.zeros_like(micro.rewards).index_add_(0, micro.sequence_of_token, penalty)
    shaped = (micro.rewards - paid)[real]
    if shaped.numel():
        meter.mean("critic/rewards/mean", shaped.double().sum(), shaped.numel())
        meter.max("critic/rewards/max", shaped.max())
        meter.min("critic/rewards/min", shaped.min())


def _is_whole(sample: Sample) -> bool:
    return sample.finish != "abort" and sample.num_response_tokens > 0


def _report_scores(name: str, rewards: NDArray[np.float64], meter: Statistics) -> None:
    if len(rewards):
        meter.mean(f"{name}/mean", float(rewards.sum()), len(rewards))
        meter.max(f"{name}/max", float(rewards.max()))
        meter.min(f"{name}/min", float(rewards.min()))
