"""Log-probs and entropies of tokens, straight from the hidden states, when the vocabulary is split over tensor-parallel
ranks.

Logits are the largest tensor of a training step: tokens x vocabulary. Here they exist for one chunk of tokens at a
time, in the forward pass and again in the backward pass, so the memory they take is that of a chunk. No rank ever sees
the whole vocabulary: each reduces its own columns, and two all-reduces of ``[T]``-sized tensors finish the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def hidden_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: dist.ProcessGroup,
    first_column: int,
    num_columns: int,
    temperature: float,
    chunk_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row, both ``[T]`` fp32 and differentiable, of
    softmax(hidden @ weight.T / temperature).

    ``hidden`` ``[T, h]`` is the same on all ranks of ``group``; ``weight`` ``[rows, h]`` is this rank's part of the
    output layer, whose first ``num_columns`` rows (maybe none) are tokens ``first_column``, ``first_column + 1``, ...
    and whose other rows are padding. ``targets`` index the whole vocabulary. Logits of ``chunk_tokens`` tokens exist at
    a time (0: of all); the chunk changes memory, not the maths. Collective over ``group`` in the forward pass only.

    The gradient of ``hidden`` is this rank's part of a sum over the group, which the caller has to take. Rows of
    padding get a gradient of zero.
    """
    vocabulary = _Vocabulary(
        first_column, num_columns, temperature, chunk_tokens, group if dist.get_world_size(group) > 1 else None
    )
    results: tuple[torch.Tensor, torch.Tensor] = _HiddenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, vocabulary
    )
    return results


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """This rank's part of the vocabulary, and how it is worked through."""

    first_column: int
    num_columns: int
    temperature: float
    chunk_tokens: int
    group: dist.ProcessGroup | None

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """The tokens in runs of ``chunk_tokens``; nothing when the rank has no columns."""
        if self.num_columns == 0 or num_tokens == 0:
            return
        size = self.chunk_tokens or num_tokens
        for start in range(0, num_tokens, size):
            yield slice(start, min(start + size, num_tokens))

    def scaled_logits(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """logits / temperature of some tokens, at least fp32; the caller may overwrite them.

        Forward and backward call it with the same operands, so they see the same bits.
        """
        logits = hidden @ weight[: self.num_columns].T
        return logits.to(_precision(hidden)).div_(self.temperature)

    def find(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(column of each target, 0 if it is another rank's; whether it is this rank's), both ``[T]``."""
        local = targets - self.first_column
        here = (local >= 0) & (local < self.num_columns)
        return torch.where(here, local, 0), here


class _HiddenLogprobs(torch.autograd.Function):
    """With p = softmax(x) of the scaled logits x: d log p[y] / dx = 1[y] - p and d H / dx = -p * (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: _Vocabulary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        highest, sums = _reduce_columns(hidden, weight, targets, vocabulary)
        if vocabulary.group is not None:
            highest, sums = _reduce_ranks(highest, sums, vocabulary.group)
        normalizer, weighted, target = sums
        log_normalizer = normalizer.log()
        entropy = log_normalizer - weighted / normalizer
        ctx.save_for_backward(hidden, weight, targets, highest, log_normalizer, entropy)
        ctx.vocabulary = vocabulary
        ctx.set_materialize_grads(False)
        return (target - highest) - log_normalizer, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> Any:
        hidden, weight, targets, highest, log_normalizer, entropy = ctx.saved_tensors
        vocabulary: _Vocabulary = ctx.vocabulary
        gradients = _Gradients(hidden, weight, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        columns, here = vocabulary.find(targets)
        for_logprobs = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs
        for_target = for_logprobs * here

        # a function, so that its buffers are gone when the next chunk begins
        def gradient_of_logits(chunk: slice) -> torch.Tensor:
            """p * -(grad_logprobs + grad_entropy * (log p + H)), and grad_logprobs at the target; in two buffers."""
            # The maximum goes first: next to large logits the normalizer would be lost in rounding.
            log_p = vocabulary.scaled_logits(hidden[chunk], weight).sub_(highest[chunk, None])
            log_p.sub_(log_normalizer[chunk, None])
            grad = log_p.exp()
            if grad_entropy is None:
                grad.mul_(-for_logprobs[chunk, None])
            else:
                log_p.add_(entropy[chunk, None]).mul_(grad_entropy[chunk, None]).add_(for_logprobs[chunk, None])
                grad.mul_(log_p.neg_())
            grad.scatter_add_(1, columns[chunk, None], for_target[chunk, None])
            return grad.div_(vocabulary.temperature).to(hidden.dtype)

        for chunk in vocabulary.chunks(len(hidden)):
            gradients.add(chunk, gradient_of_logits(chunk))
        return gradients.hidden, gradients.finished_weight(), None, None


def _reduce_columns(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: _Vocabulary
) -> tuple[torch.Tensor, torch.Tensor]:
    """Over this rank's columns: the maximum m ``[T]``, and ``[3, T]``: the sums of exp(x - m) and of
    exp(x - m) * (x - m), and the target's x (0 if the target is another rank's).
    """
    highest = hidden.new_full((len(hidden),), float("-inf"), dtype=_precision(hidden))
    sums = highest.new_zeros(3, len(hidden))
    columns, here = vocabulary.find(targets)

    # a function, so that its buffers are gone when the next chunk begins
    def reduce(chunk: slice) -> None:
        logits = vocabulary.scaled_logits(hidden[chunk], weight)
        highest[chunk] = logits.amax(dim=1)
        sums[2, chunk] = logits.gather(1, columns[chunk, None])[:, 0] * here[chunk]
        shifted = logits.sub_(highest[chunk, None])
        exponentials = shifted.exp()
        sums[0, chunk] = exponentials.sum(1)
        sums[1, chunk] = exponentials.mul_(shifted).sum(1)

    for chunk in vocabulary.chunks(len(hidden)):
        reduce(chunk)
    return highest, sums


def _reduce_ranks(
    highest: torch.Tensor, sums: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same over all ranks' columns: each rank's sums are moved from its own maximum to the common one."""
    common = highest.clone()
    dist.all_reduce(common, op=dist.ReduceOp.MAX, group=group)
    normalizer, weighted, target = sums
    # a rank without columns has the maximum -inf and nothing to move
    distance = torch.where(torch.isneginf(highest), 0, highest - common)
    factor = distance.exp()
    moved = torch.stack([normalizer * factor, (weighted + distance * normalizer) * factor, target])
    dist.all_reduce(moved, group=group)
    return common, moved


class _Gradients:
    """The gradients of hidden states and output layer, filled chunk by chunk."""

    def __init__(self, hidden: torch.Tensor, weight: torch.Tensor, of_hidden: bool, of_weight: bool) -> None:
        self._inputs = (hidden, weight)
        self.hidden = torch.zeros_like(hidden) if of_hidden else None
        # At least fp32: a sum over chunks in bf16 would round once per chunk.
        self._weight = torch.zeros_like(weight, dtype=_precision(weight)) if of_weight else None

    def add(self, chunk: slice, grad: torch.Tensor) -> None:
        """Add what ``grad``, the gradient of the chunk's logits ``[tokens, columns]``, implies."""
        hidden, weight = self._inputs
        num_columns = grad.size(1)
        if self.hidden is not None:
            torch.mm(grad, weight[:num_columns], out=self.hidden[chunk])
        if self._weight is not None and self._weight.dtype == grad.dtype:
            self._weight[:num_columns].addmm_(grad.T, hidden[chunk])
        elif self._weight is not None:
            # The products pass through the narrow type before they are added: some rows at a time, so that they take
            # no more memory than the chunk's logits.
            num_rows = max(1, grad.numel() // hidden.size(1))
            for start in range(0, num_columns, num_rows):
                rows = slice(start, min(start + num_rows, num_columns))
                self._weight[rows].add_(grad[:, rows].T @ hidden[chunk])

    def finished_weight(self) -> torch.Tensor | None:
        """The gradient of the output layer in its own type."""
        return None if self._weight is None else self._weight.to(self._inputs[1].dtype)


def _precision(tensor: torch.Tensor) -> torch.dtype:
    """What sums over the vocabulary are taken in: fp32, or fp64 where the input has it."""
    return torch.promote_types(tensor.dtype, torch.float32)


def align_to_tokens(predictions: torch.Tensor) -> torch.Tensor:
    """Output ``t`` of a decoder speaks about token ``t + 1``; move it there.

    The first position of a packed batch receives the last one's value. It is the first token of a sequence, which no
    model predicts and whose loss mask is 0.
    """
    return predictions.roll(1, dims=0)


def next_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """What each output of a packed decoder is asked to predict (the inverse alignment of `align_to_tokens`)."""
    return token_ids.roll(-1, dims=0)
