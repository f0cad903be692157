"""The second half of a layer: one gated MLP, or the few experts that each token's router picks."""

from __future__ import annotations

import torch
from torch.nn import functional

from megarl.config.model_shape import ExpertShape
from megarl.generation.embedded.rounding import MIN_ROWS
from megarl.generation.embedded.weights import ExpertWeights, MlpWeights

# Up to so many multiplications in a layer's experts, one product for each costs more than it saves (measured on CPU).
_SMALL = 4_000_000


def add_mlp(hidden: torch.Tensor, normed: torch.Tensor, weights: MlpWeights) -> torch.Tensor:
    """The residual plus the MLP of ``normed``; the addition happens inside the matrix product."""
    return weights.down.added_to(hidden, _activate(weights.gate_up.times(normed)))


def add_experts_(
    hidden: torch.Tensor, normed: torch.Tensor, weights: ExpertWeights, shape: ExpertShape
) -> torch.Tensor:
    """Add the mixture of experts of ``normed`` to the residual in place.

    There are at least `MIN_ROWS` tokens. What a token's experts give is added in the order of their shares, whatever
    the other tokens chose.
    """
    logits = functional.linear(normed, weights.routers)
    probabilities = logits[:, : shape.num_experts].softmax(dim=-1, dtype=torch.float32)
    shares, chosen = probabilities.topk(shape.num_experts_per_token, dim=-1)
    if shape.normalize_top_k:
        shares /= shares.sum(dim=-1, keepdim=True)
    mixed = torch.bmm(shares[:, None], _ask_chosen(normed, chosen, weights).float())[:, 0]
    if weights.shared is not None:
        shared = weights.shared.down.times(_activate(weights.shared.gate_up.times(normed)))
        mixed += shared.mul_(logits[:, shape.num_experts :].sigmoid())
    return hidden.add_(mixed)


def _activate(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def _ask_chosen(tokens: torch.Tensor, chosen: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """What each token's chosen experts make of it, ``[token, choice, hidden]``."""
    num_tokens, num_choices = chosen.shape
    experts, order = chosen.flatten().sort(stable=True)
    by_expert = tokens[order // num_choices]
    counts = torch.bincount(experts, minlength=len(weights.down))
    most = max(int(counts.max()), MIN_ROWS)
    if most * (weights.gate_up.numel() + weights.down.numel()) <= _SMALL:
        ranks = torch.arange(len(experts), device=experts.device) - (counts.cumsum(0) - counts)[experts]
        answers = _ask_together(by_expert, experts * most + ranks, most, weights)
    else:
        answers = _ask_in_turn(by_expert, counts.tolist(), weights)
    return torch.empty_like(answers).index_copy_(0, order, answers).view(num_tokens, num_choices, -1)


def _ask_together(tokens: torch.Tensor, places: torch.Tensor, num_rows: int, weights: ExpertWeights) -> torch.Tensor:
    """All experts in one batched product of ``num_rows`` rows each; ``places`` says which row a token takes."""
    num_experts, hidden_size, _ = weights.down.shape
    padded = tokens.new_zeros(num_experts * num_rows, hidden_size).index_copy_(0, places, tokens)
    inner = _activate(torch.bmm(padded.view(num_experts, num_rows, -1), weights.gate_up.transpose(1, 2)))
    return torch.bmm(inner, weights.down.transpose(1, 2)).view(-1, hidden_size)[places]


def _ask_in_turn(tokens: torch.Tensor, counts: list[int], weights: ExpertWeights) -> torch.Tensor:
    """One expert after the other, those without tokens left out. ``counts`` says how many tokens each one has."""
    answers = torch.empty_like(tokens)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        # Tokens of neighbours make up the rows that are missing; their answers are thrown away.
        first = min(start, len(tokens) - max(count, MIN_ROWS))
        rows = tokens[first : first + max(count, MIN_ROWS)]
        inner = _activate(functional.linear(rows, weights.gate_up[expert]))
        given = functional.linear(inner, weights.down[expert])
        answers[start : start + count] = given[start - first : start - first + count]
        start += count
    return answers
