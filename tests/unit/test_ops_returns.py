"""GAE over packed sequences equals a slow loop over each sequence on its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.ops.returns import gae

NUMBERS = st.floats(-3, 3, width=32)
SEQUENCE = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=12)  # (reward, value, own token)
UNIT = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


def slow_gae(
    sequences: list[list[tuple[float, float, bool]]], gamma: float, gae_lambda: float
) -> tuple[list[float], list[float]]:
    advantages, returns = [], []
    for sequence in sequences:
        own = [t for t, (_, _, chosen) in enumerate(sequence) if chosen]
        advantage, result = [0.0] * len(sequence), [0.0] * len(sequence)
        for place, t in enumerate(own):
            # the definition: a discounted sum of temporal differences, not a recursion
            total = 0.0
            for later in range(place, len(own)):
                reward, value, _ = sequence[own[later]]
                following = sequence[own[later + 1]][1] if later + 1 < len(own) else 0.0
                total += (gamma * gae_lambda) ** (later - place) * (reward + gamma * following - value)
            advantage[t] = total
            result[t] = total + sequence[t][1]
        advantages += advantage
        returns += result
    return advantages, returns


def packed(sequences: list[list[tuple[float, float, bool]]]) -> tuple[torch.Tensor, ...]:
    tokens = [token for sequence in sequences for token in sequence]
    rewards, values, mask = (torch.tensor(column, dtype=torch.float32) for column in zip(*tokens, strict=True))
    number = torch.tensor([i for i, sequence in enumerate(sequences) for _ in sequence])
    return rewards, values, mask, number


@settings(max_examples=150, deadline=None)
@given(st.lists(SEQUENCE, min_size=1, max_size=6), UNIT, UNIT)
def test_packed_gae_equals_the_definition(
    sequences: list[list[tuple[float, float, bool]]], gamma: float, gae_lambda: float
) -> None:
    advantages, returns = gae(*packed(sequences), gamma, gae_lambda)
    expected_advantages, expected_returns = slow_gae(sequences, gamma, gae_lambda)
    # float32 sums of at most 12 numbers of size 9
    np.testing.assert_allclose(advantages.numpy(), expected_advantages, atol=2e-4, rtol=1e-5)
    np.testing.assert_allclose(returns.numpy(), expected_returns, atol=2e-4, rtol=1e-5)


def test_a_batch_without_policy_tokens_is_all_zeros() -> None:
    rewards = values = torch.ones(5)
    advantages, returns = gae(rewards, values, torch.zeros(5), torch.tensor([0, 0, 1, 1, 1]), 1.0, 0.95)
    assert advantages.tolist() == returns.tolist() == [0.0] * 5


def test_without_discount_returns_are_the_rewards_to_go() -> None:
    """gamma = lambda = 1: the critic cancels out of the returns."""
    rewards = torch.tensor([0.0, 1.0, 2.0, 4.0, 8.0])
    values = torch.tensor([9.0, -7.0, 5.0, 3.0, -2.0])
    advantages, returns = gae(rewards, values, torch.ones(5), torch.tensor([0, 0, 0, 1, 1]), 1.0, 1.0)
    assert returns.tolist() == [3.0, 3.0, 2.0, 12.0, 8.0]
    assert advantages.tolist() == [-6.0, 10.0, -3.0, 9.0, 10.0]


def test_lambda_zero_is_one_step_and_gamma_zero_forgets_the_future() -> None:
    rewards, values = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5, 0.25, 2.0])
    sequence = torch.zeros(3, dtype=torch.int64)
    one_step, _ = gae(rewards, values, torch.ones(3), sequence, 0.5, 0.0)
    assert one_step.tolist() == [1 + 0.125 - 0.5, 2 + 1 - 0.25, 3 - 2.0]
    blind, returns = gae(rewards, values, torch.ones(3), sequence, 0.0, 1.0)
    assert blind.tolist() == [0.5, 1.75, 1.0]
    assert returns.tolist() == rewards.tolist()


@pytest.mark.parametrize("where", ["rewards", "values"])
def test_what_stands_at_masked_tokens_does_not_matter(where: str) -> None:
    rewards, values = torch.tensor([0.0, 0.0, 0.0, 1.0]), torch.tensor([0.0, 0.3, 0.0, 0.6])
    mask, sequence = torch.tensor([0.0, 1.0, 0.0, 1.0]), torch.zeros(4, dtype=torch.int64)
    expected = gae(rewards, values, mask, sequence, 0.9, 0.8)
    {"rewards": rewards, "values": values}[where][mask == 0] = float("nan")
    for result, clean in zip(gae(rewards, values, mask, sequence, 0.9, 0.8), expected, strict=True):
        assert result.tolist() == clean.tolist()
