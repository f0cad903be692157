"""Log-probs and entropies of tokens when the vocabulary is split over tensor-parallel ranks.

No rank ever sees the whole vocabulary: each reduces its own columns, and two all-reduces of ``[T]``-sized tensors
finish the softmax.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    first_column: int = 0,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row, both ``[T]`` and differentiable, of softmax(logits /
    temperature).

    ``logits`` is this rank's ``[T, columns]`` slice of the vocabulary, which begins at ``first_column`` and has its
    padding columns cut off (a slice may be empty). ``targets`` index the whole vocabulary.
    """
    peers = group if dist.get_world_size(group) > 1 else None
    results: tuple[torch.Tensor, torch.Tensor] = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits, targets, first_column, peers, temperature
    )
    return results


class _VocabParallelLogprobs(torch.autograd.Function):
    """With p = softmax(x / temperature): d log p[y] / dx = (1[y] - p) / temperature and
    d H / dx = -p * (log p + H) / temperature."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        start: int,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = logits.float() / temperature
        highest = scaled.amax(dim=1) if scaled.size(1) else scaled.new_full((scaled.size(0),), float("-inf"))
        if group is not None:
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        shifted = scaled - highest[:, None]
        exponentials = shifted.exp()
        local = targets - start
        here = (local >= 0) & (local < scaled.size(1))
        column = torch.where(here, local, 0)[:, None]
        target_shifted = shifted.gather(1, column)[:, 0] * here if scaled.size(1) else highest.new_zeros(len(targets))
        sums = torch.stack([exponentials.sum(1), (exponentials * shifted).sum(1), target_shifted])
        if group is not None:
            dist.all_reduce(sums, group=group)
        normalizer, weighted, target = sums
        log_normalizer = normalizer.log()
        entropy = log_normalizer - weighted / normalizer
        probabilities = exponentials.div_(normalizer[:, None])
        ctx.save_for_backward(probabilities, shifted.sub_(log_normalizer[:, None]), entropy, column, here)
        ctx.temperature = temperature
        ctx.dtype = logits.dtype
        return target - log_normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: torch.Tensor, grad_entropy: torch.Tensor) -> Any:
        probabilities, log_probabilities, entropy, column, here = ctx.saved_tensors
        grad = probabilities * -grad_logprobs[:, None]
        if grad.size(1):
            grad.scatter_add_(1, column, (grad_logprobs * here)[:, None])
        if grad_entropy is not None and bool(grad_entropy.any()):
            grad -= grad_entropy[:, None] * probabilities * (log_probabilities + entropy[:, None])
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None


def align_to_tokens(predictions: torch.Tensor) -> torch.Tensor:
    """Output ``t`` of a decoder speaks about token ``t + 1``; move it there.

    The first position of a packed batch receives the last one's value. It is the first token of a sequence, which no
    model predicts and whose loss mask is 0.
    """
    return predictions.roll(1, dims=0)


def next_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """What each output of a packed decoder is asked to predict (the inverse alignment of `align_to_tokens`)."""
    return token_ids.roll(-1, dims=0)
