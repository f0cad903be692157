"""Experts: the same numbers whichever way they are asked, and whoever else is asking."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megarl.config.model_shape import ExpertShape
from megarl.generation.embedded.feed_forward import add_experts_
from megarl.generation.embedded.matrix import Matrix
from megarl.generation.embedded.weights import ExpertWeights, MlpWeights

# The small ones are asked together; the large ones are too much work for that and are asked in turn.
SIZES = {"small": (32, 24, 8), "large": (128, 192, 60)}


def make_experts(size: str, top_k: int, shared: bool, normalize: bool = True) -> tuple[ExpertWeights, ExpertShape]:
    hidden, intermediate, num_experts = SIZES[size]
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    weights = ExpertWeights(
        routers=random(num_experts + shared, hidden),
        gate_up=random(num_experts, 2 * intermediate, hidden),
        down=random(num_experts, hidden, intermediate),
        shared=MlpWeights(sealed(random(2 * 40, hidden)), sealed(random(hidden, 40))) if shared else None,
    )
    return weights, ExpertShape(num_experts, top_k, intermediate, normalize, 40 if shared else 0)


def sealed(plain: torch.Tensor) -> Matrix:
    matrix = Matrix(plain)
    matrix.seal()
    return matrix


def make_tokens(size: str, count: int) -> torch.Tensor:
    return torch.randn(count, SIZES[size][0], generator=torch.Generator().manual_seed(count))


def add_experts(tokens: torch.Tensor, weights: ExpertWeights, shape: ExpertShape) -> torch.Tensor:
    with torch.inference_mode():
        return add_experts_(tokens * 0.5, tokens, weights, shape)


def mlp(token: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up.double() @ token).chunk(2)
    return down.double() @ (functional.silu(gate) * up)


def one_token_at_a_time(tokens: torch.Tensor, weights: ExpertWeights, shape: ExpertShape) -> torch.Tensor:
    """The definition, in float64: no batching, no order, no stacking."""
    rows = []
    for token in tokens.double():
        logits = weights.routers.double() @ token
        probabilities = logits[: shape.num_experts].softmax(0)
        chosen = probabilities.argsort(descending=True)[: shape.num_experts_per_token].tolist()
        total = sum(probabilities[expert] for expert in chosen) if shape.normalize_top_k else 1.0
        row = token * 0.5
        for expert in chosen:
            row = row + probabilities[expert] / total * mlp(token, weights.gate_up[expert], weights.down[expert])
        if weights.shared is not None:
            row = row + logits[-1].sigmoid() * mlp(token, weights.shared.gate_up.values(), weights.shared.down.values())
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("count", "top_k"), [(4, 1), (5, 8), (37, 2)])
@pytest.mark.parametrize("size", SIZES)
def test_experts_give_what_the_definition_says(
    size: str, count: int, top_k: int, shared: bool, normalize: bool
) -> None:
    weights, shape = make_experts(size, top_k, shared, normalize)
    tokens = make_tokens(size, count)
    expected = one_token_at_a_time(tokens, weights, shape)
    # sums of up to 192 products of order 1 in fp32; a wrong expert or share is off by more than 1e-2
    torch.testing.assert_close(add_experts(tokens, weights, shape).double(), expected, atol=3e-6, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_token_does_not_feel_the_others(size: str, shared: bool) -> None:
    weights, shape = make_experts(size, 4, shared)
    tokens = make_tokens(size, 50)
    together = add_experts(tokens, weights, shape)
    for index in range(0, len(tokens), 7):
        company = torch.cat([tokens[index : index + 1], make_tokens(size, 3)])
        # equal on MKL; another BLAS may sum in another order for another number of rows
        torch.testing.assert_close(add_experts(company, weights, shape)[0], together[index], atol=2e-6, rtol=0)


def test_experts_are_asked_in_the_same_way_by_a_crowd() -> None:
    """Enough tokens turn small experts from together to in turn; nobody's numbers change."""
    weights, shape = make_experts("small", 2, shared=True)
    crowd = make_tokens("small", 2000)
    together = add_experts(crowd, weights, shape)
    apart = torch.cat([add_experts(part, weights, shape) for part in crowd.split(50)])
    # equal on MKL; another BLAS may sum in another order for another number of rows
    torch.testing.assert_close(together, apart, atol=2e-6, rtol=0)


@pytest.mark.parametrize("size", SIZES)
def test_experts_that_nobody_chose_do_not_matter(size: str) -> None:
    """Their weights may be anything: zero times NaN must not reach a token."""
    weights, shape = make_experts(size, 1, shared=False)
    tokens = make_tokens(size, 4)
    expected = add_experts(tokens, weights, shape)
    chosen = (tokens @ weights.routers.t()).argmax(1).tolist()
    weights.gate_up[[expert for expert in range(shape.num_experts) if expert not in chosen]] = torch.nan
    assert weights.gate_up.isnan().any()
    assert torch.equal(add_experts(tokens, weights, shape), expected)
