"""KL estimators: their formulas, and what they are estimates of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.ops.kl import Estimator, kl_estimate

LOGPROBS = st.floats(-30, 0, width=32)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(0.5 / 0.2)), ("k2", 0.5 * math.log(0.5 / 0.2) ** 2), ("k3", 0.2 / 0.5 - 1 - math.log(0.2 / 0.5))],
)
def test_formulas(estimator: Estimator, expected: float) -> None:
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.2)])
    assert kl_estimate(policy, reference, estimator).item() == pytest.approx(expected, rel=1e-6)  # float32


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_no_difference_is_exactly_zero(estimator: Estimator) -> None:
    logprobs = torch.tensor([-0.1, -5.0, -80.0])
    assert kl_estimate(logprobs, logprobs.clone(), estimator).tolist() == [0.0, 0.0, 0.0]


@given(LOGPROBS, LOGPROBS)
def test_k3_and_k2_are_never_negative(policy: float, reference: float) -> None:
    k3 = kl_estimate(torch.tensor(policy), torch.tensor(reference), "k3").item()
    # two float32 terms of size |difference| cancel: half a unit in the last place of each may be left over
    assert k3 >= -1.2e-7 * abs(policy - reference)
    assert kl_estimate(torch.tensor(policy), torch.tensor(reference), "k2").item() >= 0


@given(st.integers(0, 10_000), st.integers(2, 50))
def test_k1_and_k3_are_unbiased(seed: int, vocab_size: int) -> None:
    """The expectation over every token of the policy is the KL divergence itself."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(vocab_size, generator=generator, dtype=torch.float64).log_softmax(0)
    reference = torch.randn(vocab_size, generator=generator, dtype=torch.float64).log_softmax(0)
    divergence = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=policy), torch.distributions.Categorical(logits=reference)
    ).item()
    for estimator in ("k1", "k3"):
        expectation = (policy.exp() * kl_estimate(policy, reference, estimator)).sum().item()
        assert expectation == pytest.approx(divergence, rel=1e-10, abs=1e-12)  # float64


def test_k2_is_close_when_the_policies_are_close() -> None:
    policy = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64).log_softmax(0)
    nudge = 0.01 * torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reference = (policy + nudge).log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum().item()
    expectation = (policy.exp() * kl_estimate(policy, reference, "k2")).sum().item()
    # the bias is of third order in the nudge: one per cent of the value here
    assert expectation == pytest.approx(divergence, rel=0.03)


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 1.0), ("k2", 0.7), ("k3", 1 - math.exp(-0.7))])
def test_gradients_pull_towards_the_reference(estimator: Estimator, slope: float) -> None:
    logprobs = torch.tensor([-0.3], requires_grad=True)
    kl_estimate(logprobs, torch.tensor([-1.0]), estimator).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope, rel=1e-6)  # float32
