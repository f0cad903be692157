"""Layers for machines without Transformer Engine: RMSNorm and packed attention in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

# A bucket of sequences is padded to its longest; it is closed when padding would pass this share of its real tokens.
_MAX_PADDING = 0.25


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that a Megatron layer spec calls."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        # Tells Megatron to sum this weight's gradients over the tensor-parallel group under sequence parallelism.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packing record plus the attention plan, made once per micro-batch and used by every layer."""

    buckets: tuple[torch.Tensor, ...] = ()
    # where each token of the concatenated (padded) bucket outputs lands
    order: torch.Tensor | None = None


def pack_sequences(cu_seqlens: torch.Tensor) -> PackedSequences:
    """Describe sequences laid end to end, and group those of similar length for batched attention."""
    starts = cu_seqlens[:-1].tolist()
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
    by_length = sorted(range(len(lengths)), key=lambda i: lengths[i])
    buckets: list[torch.Tensor] = []
    positions = torch.empty(int(cu_seqlens[-1]), dtype=torch.int64)
    offset = 0
    for members in _similar_lengths(by_length, lengths):
        width = lengths[members[-1]]
        span = torch.arange(width)
        begin = torch.tensor([starts[i] for i in members])[:, None]
        length = torch.tensor([lengths[i] for i in members])[:, None]
        real = span[None, :] < length
        # padding repeats the sequence's last token; its output is dropped, so its gradient is zero
        index = begin + torch.minimum(span[None, :], length - 1)
        positions[index[real]] = torch.arange(offset, offset + index.numel()).view_as(index)[real]
        buckets.append(index)
        offset += index.numel()
    longest = max(lengths)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=tuple(bucket.to(cu_seqlens.device) for bucket in buckets),
        order=positions.to(cu_seqlens.device),
    )


def _similar_lengths(by_length: list[int], lengths: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    real = 0
    for i in by_length:
        padded = (len(groups[-1]) + 1) * lengths[i] if groups else 0
        if not groups or padded > (1 + _MAX_PADDING) * (real + lengths[i]):
            groups.append([])
            real = 0
        groups[-1].append(i)
        real += lengths[i]
    return groups


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences with torch's fused kernel.

    Sequences of similar length share one padded call. Padding is on the right, so the causal mask already keeps it
    out of every real token's sight.
    """

    def __init__(self, config: Any, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002  (Megatron's calling convention)
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[T, heads, dim] queries, [T, kv heads, dim] keys and values -> [T, heads * dim]."""
        assert packed_seq_params is not None, "megarl runs Megatron on packed sequences only"
        group_size = query.size(1) // key.size(1)
        outputs = []
        for index in packed_seq_params.buckets:
            q = query[index].transpose(1, 2)
            k = key[index].transpose(1, 2)
            v = value[index].transpose(1, 2)
            if group_size > 1:
                k = k.repeat_interleave(group_size, dim=1)
                v = v.repeat_interleave(group_size, dim=1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            outputs.append(attended.transpose(1, 2).reshape(index.numel(), -1))
        return torch.cat(outputs)[packed_seq_params.order]
