"""Importance sampling against the engine: samples come from the engine's policy, not quite from the trainer's.

The clipped loss compares the policy with the trainer's own log-probs at the start of the step (π_old). Tokens were
drawn by the engine (π_engine): with other kernels, another precision, and older weights if samples may be stale. Each
token's policy loss is therefore multiplied by a constant weight made of r = π_old / π_engine, which keeps the two
ratios apart (decoupled PPO: Hilton et al., 2022): clipping bounds the update, the weight corrects for who drew.

* ``truncate``: min(r, high) (TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training",
  2025).
* ``mask``: r inside [low, high], 0 outside (masked importance sampling, IcePop: 2025).

At level ``sequence``, r is the product over the sequence's sampled tokens, the same for all of them.

Denominators do not change: a token with weight 0 still counts where token losses are averaged, so that masking lowers
the update rather than giving the rest more to say, and every rank and layout divides by the same numbers. The KL, the
entropy bonus, the supervised term and the critic's loss are not weighted. If engine and trainer agree exactly, all
weights are exactly 1.
"""

from __future__ import annotations

import torch

from megarl.config.algorithms import CorrectionSettings
from megarl.core.batch import MicroBatch
from megarl.core.protocols import Statistics
from megarl.ops.masked import total

# e^20 is beyond every limit; a log-ratio past it must not overflow.
_LARGEST_LOG_RATIO = 20.0


def engine_ratio(micro: MicroBatch, level: str) -> torch.Tensor:
    """[T] π_old / π_engine of the tokens that the policy sampled, or of their sequences; 1 for other tokens."""
    assert micro.old_logprobs is not None
    own = micro.loss_mask.bool()
    gap = torch.where(own, micro.old_logprobs - micro.rollout_logprobs, 0.0)
    if level == "sequence":
        lengths = micro.cu_seqlens.diff().long()
        # in float64, sequence by sequence: the sum must not depend on the company that a sequence is packed with
        sums = torch.segment_reduce(gap.double(), "sum", lengths=lengths, initial=0.0)
        gap = torch.where(own, sums[micro.sequence_of_token].to(gap.dtype), 0.0)
    return gap.clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()


def correction_weights(micro: MicroBatch, settings: CorrectionSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """[T] what each token's policy loss is multiplied with, and [T] bool whether that is less than its ratio."""
    ratio = engine_ratio(micro, settings.level)
    if settings.kind == "mask":
        cut = (ratio < settings.low) | (ratio > settings.high)
        return torch.where(cut, 0.0, ratio), cut
    cut = ratio > settings.high
    return ratio.clamp(max=settings.high), cut


def report_correction(micro: MicroBatch, settings: CorrectionSettings, meter: Statistics) -> None:
    """How much the correction changes, over the policy's own tokens."""
    if settings.kind == "none":
        return
    weights, cut = correction_weights(micro, settings)
    num_tokens = total(micro.loss_mask)
    meter.mean("mismatch/correction_mean", total(weights * micro.loss_mask), num_tokens)
    meter.mean("mismatch/corrected_frac", total(cut * micro.loss_mask), num_tokens)
