"""Statistics over masked tokens of all data-parallel ranks. An empty mask gives zero, never NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.core.batch import MicroBatch
from megarl.core.world import World


def total(column: torch.Tensor) -> torch.Tensor:
    """A sum in float64: statistics must not depend on how tokens are split over micro-batches and ranks."""
    return column.double().sum()


def sequence_means(column: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum over sequences of the column's mean over the masked tokens, number of sequences that have such tokens)."""
    mask = micro.loss_mask.double()
    sequence = micro.sequence_of_token
    lengths = torch.zeros(micro.num_sequences, dtype=torch.float64, device=mask.device).index_add_(0, sequence, mask)
    sums = torch.zeros_like(lengths).index_add_(0, sequence, column.double() * mask)
    present = lengths > 0
    return (sums[present] / lengths[present]).sum(), present.sum()


def whiten(values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], world: World) -> list[torch.Tensor]:
    """Shift and scale masked values to mean 0 and variance 1 over the whole batch, on all ranks; masked-out ones
    become 0.

    Collective over the data-parallel group. The variance is taken around the global mean in a second pass, which keeps
    float32 accurate when the mean is large.
    """
    count, total = world.sum_over_dp(_sums(values, masks))
    mean = total / count.clamp(min=1)
    _, squares = world.sum_over_dp(_sums([(v - mean).square() for v in values], masks))
    variance = squares / count.clamp(min=1)
    scale = torch.rsqrt(variance + 1e-8)
    return [((v - mean) * scale * m).to(v.dtype) for v, m in zip(values, masks, strict=True)]


def _sums(values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """[number of masked tokens, their sum] in float64."""
    count = sum((m.double().sum() for m in masks), torch.zeros((), dtype=torch.float64))
    total = sum(
        ((v.double() * m.double()).sum() for v, m in zip(values, masks, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )
    return torch.stack([count, total])
