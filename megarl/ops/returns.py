"""Generalised advantage estimation over packed sequences (Schulman et al., 2016)."""

from __future__ import annotations

import torch


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sequence_of_token: torch.Tensor,
    gamma: float,
    gae_lambda: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns, ``[T]``, 0 outside the mask.

    ``values[t]`` judges the state in which token ``t`` is chosen. Time runs over the policy's own tokens: a masked
    token (a tool's answer) between two of them is passed over. After the last one comes a terminal state of value 0.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    chosen = mask.bool().nonzero()[:, 0]
    if chosen.numel() == 0:
        return advantages, returns
    rows, columns, width = _right_aligned(sequence_of_token[chosen])
    num_rows = int(rows.max()) + 1
    reward, value = values.new_zeros(num_rows, width), values.new_zeros(num_rows, width)
    reward[rows, columns], value[rows, columns] = rewards[chosen].to(values.dtype), values[chosen]
    grid = torch.zeros_like(value)
    running, next_value = values.new_zeros(num_rows), values.new_zeros(num_rows)
    for t in reversed(range(width)):
        delta = reward[:, t] + gamma * next_value - value[:, t]
        running = delta + gamma * gae_lambda * running
        next_value = value[:, t]
        grid[:, t] = running
    advantages[chosen] = grid[rows, columns]
    returns[chosen] = advantages[chosen] + values[chosen]
    return advantages, returns


def _right_aligned(sequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Grid coordinates that put every sequence's last token into the last column.

    Rows are filled up on the left, where the recursion, which runs from the right, never looks back.
    """
    rows = torch.unique_consecutive(sequence, return_inverse=True)[1]
    lengths = torch.bincount(rows)
    width = int(lengths.max())
    within = torch.arange(len(sequence), device=sequence.device) - (lengths.cumsum(0) - lengths)[rows]
    return rows, within + width - lengths[rows], width
