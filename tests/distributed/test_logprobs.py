"""Log-probs and entropies over a split vocabulary equal torch's over a whole one, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE = 17, 99, 10
NUM_PADDING_ROWS = 3
# Where the ranks' slices begin and end: an odd vocabulary padded to two equal widths, very uneven slices, empty ones.
SLICES = {
    "one rank": [(0, 99)],
    "padded": [(0, 50), (50, 99)],
    "uneven": [(0, 3), (3, 99)],
    "second empty": [(0, 99), (99, 99)],
    "first empty": [(0, 0), (0, 99)],
}


def logprobs_job(world: Any, data: list[np.ndarray], slices: Any, **options: Any) -> list[np.ndarray]:
    """This rank's log-probs, entropies, and gradients of the hidden states (a part of a sum) and of its rows, for the
    loss sum(w0 logprob + w1 entropy).
    """
    from megarl.ops.logprobs import hidden_logprobs

    dtype = getattr(torch, options["dtype"])
    hidden, weight, targets, loss_weights = (torch.from_numpy(array) for array in data)
    begin, end = slices[world.tp.rank]
    # padding must not matter, whatever is in it
    rows = torch.cat([weight[begin:end], torch.full((NUM_PADDING_ROWS, HIDDEN_SIZE), 50.0)])
    rows, hidden = rows.to(dtype).requires_grad_(), hidden.to(dtype).requires_grad_()
    logprobs, entropy = hidden_logprobs(
        hidden, rows, targets, group=world.tp.group, first_column=begin, num_columns=end - begin,
        temperature=options["temperature"], chunk_tokens=options["chunk_tokens"],
    )  # fmt: skip
    assert logprobs.dtype == entropy.dtype == torch.float32
    (loss_weights * torch.stack([logprobs, entropy])).sum().backward()
    assert hidden.grad is not None and rows.grad is not None
    assert hidden.grad.dtype == rows.grad.dtype == dtype
    assert not rows.grad[end - begin :].any()
    found = (logprobs.detach(), entropy.detach(), hidden.grad, rows.grad[: end - begin])
    return [tensor.float().numpy() for tensor in found]


def reference(data: list[np.ndarray], temperature: float) -> list[np.ndarray]:
    hidden, weight = (torch.from_numpy(array).double().requires_grad_() for array in data[:2])
    distribution = torch.distributions.Categorical(logits=hidden @ weight.T / temperature)
    logprobs, entropy = distribution.log_prob(torch.from_numpy(data[2])), distribution.entropy()
    (torch.from_numpy(data[3]) * torch.stack([logprobs, entropy])).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return [tensor.detach().numpy() for tensor in (logprobs, entropy, hidden.grad, weight.grad)]


def joined(results: list[list[np.ndarray]]) -> list[np.ndarray]:
    """The ranks' results as one: equal outputs, the hidden states' gradients summed, the rows laid end to end."""
    for result in results[1:]:
        assert np.array_equal(result[0], results[0][0]), "tensor-parallel twins must hold identical losses"
        assert np.array_equal(result[1], results[0][1])
    return [*results[0][:2], sum(result[2] for result in results), np.concatenate([result[3] for result in results])]


def numbers(scale: float) -> list[np.ndarray]:
    """[hidden states, output layer, targets, weights of log-probs and entropies in the loss]."""
    generator = np.random.default_rng(5)
    hidden = generator.standard_normal((NUM_TOKENS, HIDDEN_SIZE)).astype(np.float32)
    weight = (scale * generator.standard_normal((VOCAB_SIZE, HIDDEN_SIZE))).astype(np.float32)
    targets = generator.integers(0, VOCAB_SIZE, NUM_TOKENS)
    targets[:4] = (0, 49, 50, 98)  # the edges of the slices
    return [hidden, weight, targets, generator.standard_normal((2, NUM_TOKENS)).astype(np.float32)]


@pytest.mark.parametrize(("temperature", "chunk_tokens"), [(0.5, 5), (1.0, 0), (1.0, 1), (1.7, 16), (1.7, 17)])
@pytest.mark.parametrize("slices", SLICES)
def test_equal_to_torch(slices: str, temperature: float, chunk_tokens: int, gang: Any) -> None:
    data = numbers(scale=1.0)
    cuts = SLICES[slices]
    results = gang(len(cuts)).run(
        logprobs_job, len(cuts), 1, data=data, slices=cuts,
        temperature=temperature, chunk_tokens=chunk_tokens, dtype="float32",
    )  # fmt: skip
    for ours, theirs in zip(joined(results), reference(data, temperature), strict=True):
        # float32 against float64: log-probs and sums of gradients reach 30, so 1e-5 is a few units in the last place
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_huge_logits_stay_finite(gang: Any) -> None:
    data = [np.round(array) if array.dtype == np.float32 else array for array in numbers(scale=4.0)]
    data[1] *= 1024  # whole numbers: logits up to 1e5 are exact in float32, so that only the softmax is judged
    results = gang(2).run(
        logprobs_job, 2, 1, data=data, slices=SLICES["padded"], temperature=1.0, chunk_tokens=4, dtype="float32"
    )
    logprobs, entropy, of_hidden, of_weight = joined(results)
    expected = reference(data, 1.0)
    np.testing.assert_allclose(logprobs, expected[0], rtol=1e-6)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-5)
    # gradients of logits below 10 times rows up to 1e4, in float32
    np.testing.assert_allclose(of_hidden, expected[2], rtol=1e-5, atol=1e-5 * np.abs(data[1]).max())
    np.testing.assert_allclose(of_weight, expected[3], atol=1e-5)


def test_bfloat16_logits_are_reduced_in_float32(gang: Any) -> None:
    data = numbers(scale=1.0)
    # an eighth of small whole numbers: the products and sums are exact, so logits are the only thing rounded
    data[0], data[1] = np.round(data[0]), np.round(4 * data[1]) / 8
    (result,) = gang(1).run(
        logprobs_job, data=data, slices=SLICES["one rank"], temperature=1.0, chunk_tokens=4, dtype="bfloat16"
    )
    logprobs, entropy, of_hidden, of_weight = reference(data, 1.0)
    np.testing.assert_allclose(result[0], logprobs, atol=1e-5)  # as precise as with float32 logits
    np.testing.assert_allclose(result[1], entropy, atol=1e-5)
    # The logits' gradient is rounded to bfloat16, and so is the result: 2**-8 each, relative to sums of magnitudes
    # that are below 8 here.
    np.testing.assert_allclose(result[2], of_hidden, atol=8 * 2**-7)
    np.testing.assert_allclose(result[3], of_weight, atol=8 * 2**-7)
