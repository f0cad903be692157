"""Log-probs and entropies over a split vocabulary equal torch's over a whole one, gradients included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

NUM_TOKENS, VOCAB_SIZE = 17, 99
# Where the ranks' slices begin and end: an odd vocabulary padded to two equal widths, very uneven slices, empty ones.
SLICES = {
    "one rank": [(0, 99)],
    "padded": [(0, 50), (50, 99)],
    "uneven": [(0, 3), (3, 99)],
    "second empty": [(0, 99), (99, 99)],
    "first empty": [(0, 0), (0, 99)],
}


def logprobs_job(world: Any, logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, **options: Any) -> Any:
    """This rank's log-probs, entropies and the gradient of its slice for the loss sum(w0 logprob + w1 entropy)."""
    from megarl.ops.logprobs import token_logprobs

    begin, end = options["slices"][world.tp.rank]
    piece = torch.from_numpy(logits)[:, begin:end].to(getattr(torch, options["dtype"])).requires_grad_()
    logprobs, entropy = token_logprobs(piece, torch.from_numpy(targets), world.tp.group, begin, options["temperature"])
    (torch.from_numpy(weights) * torch.stack([logprobs, entropy])).sum().backward()
    assert piece.grad is not None
    assert piece.grad.dtype == piece.dtype
    return logprobs.detach().numpy(), entropy.detach().numpy(), piece.grad.float().numpy()


def reference(
    logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    whole = torch.from_numpy(logits).double().requires_grad_()
    distribution = torch.distributions.Categorical(logits=whole / temperature)
    logprobs, entropy = distribution.log_prob(torch.from_numpy(targets)), distribution.entropy()
    (torch.from_numpy(weights) * torch.stack([logprobs, entropy])).sum().backward()
    assert whole.grad is not None
    return logprobs.detach().numpy(), entropy.detach().numpy(), whole.grad.numpy()


def numbers(scale: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    logits = (scale * generator.standard_normal((NUM_TOKENS, VOCAB_SIZE))).astype(np.float32)
    targets = generator.integers(0, VOCAB_SIZE, NUM_TOKENS)
    targets[:4] = (0, 49, 50, 98)  # the edges of the slices
    return logits, targets, generator.standard_normal((2, NUM_TOKENS)).astype(np.float32)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("slices", SLICES)
def test_equal_to_torch(slices: str, temperature: float, gang: Any) -> None:
    data = numbers(scale=3.0)
    cuts = SLICES[slices]
    results = gang(len(cuts)).run(
        logprobs_job, len(cuts), 1, logits=data[0], targets=data[1], weights=data[2],
        slices=cuts, temperature=temperature, dtype="float32",
    )  # fmt: skip
    logprobs, entropy, gradient = reference(*data, temperature)
    for result in results:
        # float32 against float64: log-probs reach 30, so 1e-5 is a few units in the last place
        np.testing.assert_allclose(result[0], logprobs, atol=1e-5)
        np.testing.assert_allclose(result[1], entropy, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([result[2] for result in results], axis=1), gradient, atol=2e-6)
    for result in results[1:]:
        assert np.array_equal(result[0], results[0][0]), "tensor-parallel twins must hold identical losses"
        assert np.array_equal(result[1], results[0][1])


def test_huge_logits_stay_finite(gang: Any) -> None:
    data = numbers(scale=1e4)
    results = gang(2).run(
        logprobs_job, 2, 1, logits=data[0], targets=data[1], weights=data[2],
        slices=SLICES["padded"], temperature=1.0, dtype="float32",
    )  # fmt: skip
    logprobs, entropy, gradient = reference(*data, 1.0)
    np.testing.assert_allclose(results[0][0], logprobs, rtol=1e-6)
    np.testing.assert_allclose(results[0][1], entropy, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([result[2] for result in results], axis=1), gradient, atol=1e-5)


def test_bfloat16_logits_are_reduced_in_float32(gang: Any) -> None:
    logits, targets, weights = numbers(scale=3.0)
    logits = torch.from_numpy(logits).bfloat16().float().numpy()  # exactly representable
    (result,) = gang(1).run(
        logprobs_job, logits=logits, targets=targets, weights=weights,
        slices=SLICES["one rank"], temperature=1.0, dtype="bfloat16",
    )  # fmt: skip
    logprobs, entropy, gradient = reference(logits, targets, weights, 1.0)
    np.testing.assert_allclose(result[0], logprobs, atol=1e-5)  # as precise as with float32 logits
    np.testing.assert_allclose(result[1], entropy, atol=1e-5)
    np.testing.assert_allclose(result[2], gradient, rtol=2**-8, atol=1e-6)  # rounded to bfloat16 once, at the end
