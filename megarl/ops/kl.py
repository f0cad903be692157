"""Per-token estimates of KL(policy || reference) from the log-probs of sampled tokens.

k1 is unbiased and noisy, k2 is its squared relative of low variance, k3 is unbiased and never negative
(Schulman, "Approximating KL Divergence", 2020).
"""

from __future__ import annotations

from typing import Literal

import torch

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: Estimator) -> torch.Tensor:
    """Elementwise estimate; both arguments are log-probs of the same tokens."""
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    # exp(ref - policy) - (ref - policy) - 1; the exponential of a gap past 20 nats would drown every other token
    return torch.expm1((-difference).clamp(max=20.0)) + difference
