"""Layers for machines without Transformer Engine: RMSNorm and packed attention in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams

from megarl.core.world import Axis

# A bucket of sequences is padded to its longest; it is closed when padding would pass this share of its real tokens.
_MAX_PADDING = 0.25


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with the constructor that a Megatron layer spec calls."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Tells Megatron to sum this weight's gradients over the tensor-parallel group under sequence parallelism.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Which tokens of the packed whole a context-parallel rank holds, and where the others are."""

    cp: Axis
    # [local tokens]: places in the whole, sequence by sequence
    held: torch.Tensor
    # [all tokens]: where each is in the concatenation of all ranks' tokens
    position_of: torch.Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length that share one call of the attention kernel, padded to the longest.

    ``queries`` index this rank's tokens, ``keys`` all ranks'; both are ``[sequences, width]``. Without a mask they are
    the same, and plain causality holds.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class PackedSequences(PackedSeqParams):  # type: ignore[misc]
    """Megatron's packing record plus the attention plan, made once per micro-batch and used by every layer."""

    buckets: tuple[Bucket, ...] = ()
    # where each of this rank's tokens is in the concatenated (padded) bucket outputs
    order: torch.Tensor | None = None
    # the ranks that hold the other tokens; None: there are none
    cp: Axis | None = None


def pack_sequences(cu_seqlens: torch.Tensor, zigzag: Zigzag | None = None) -> PackedSequences:
    """Describe sequences laid end to end, and group those of similar length for batched attention."""
    device = cu_seqlens.device
    starts, lengths = cu_seqlens[:-1].cpu().long(), (cu_seqlens[1:] - cu_seqlens[:-1]).cpu().long()
    cp_size = zigzag.cp.size if zigzag else 1
    buckets: list[Bucket] = []
    order = torch.empty(int(cu_seqlens[-1]) // cp_size, dtype=torch.int64)
    offset = 0
    by_length: list[int] = torch.argsort(lengths, stable=True).tolist()
    for members in _similar_lengths(by_length, lengths.tolist()):
        begin, length = starts[members][:, None], lengths[members][:, None]
        queries, real = _spans(begin // cp_size, length // cp_size)
        order[queries[real]] = torch.arange(offset, offset + queries.numel()).view_as(queries)[real]
        offset += queries.numel()
        keys, mask = queries, None
        if zigzag is not None:
            keys, _ = _spans(begin, length)
            position = zigzag.held[queries] - begin
            mask = (torch.arange(keys.size(1))[None, None, :] <= position[:, :, None])[:, None].to(device)
            keys = zigzag.position_of[keys]
        buckets.append(Bucket(queries.to(device), keys.to(device), mask))
    longest = int(lengths.max())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens,
        cu_seqlens_kv_padded=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buckets=tuple(buckets),
        order=order.to(device),
        cp=zigzag.cp if zigzag else None,
    )


def _spans(begin: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[sequences, longest]`` indices and which of them are real.

    Padding repeats a sequence's last token: what it attends to is dropped, so its gradient is zero.
    """
    span = torch.arange(int(length.max()))[None, :]
    return begin + torch.minimum(span, length - 1), span < length


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
    out of every real token's sight. Context-parallel ranks fetch each other's keys and values.
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
        if packed_seq_params.cp is not None:
            both = torch.cat([key, value], dim=1)
            key, value = _AllTokens.apply(both, packed_seq_params.cp).chunk(2, dim=1)  # type: ignore[no-untyped-call]
        group_size = query.size(1) // key.size(1)
        outputs = []
        for bucket in packed_seq_params.buckets:
            q = query[bucket.queries].transpose(1, 2)
            k = key[bucket.keys].transpose(1, 2)
            v = value[bucket.keys].transpose(1, 2)
            if group_size > 1:
                k = k.repeat_interleave(group_size, dim=1)
                v = v.repeat_interleave(group_size, dim=1)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bucket.mask, is_causal=bucket.mask is None, scale=self.config.softmax_scale
            )
            outputs.append(attended.transpose(1, 2).reshape(bucket.queries.numel(), -1))
        return torch.cat(outputs)[packed_seq_params.order]


class _AllTokens(torch.autograd.Function):
    """The keys and values of all context-parallel ranks; backward sums what every rank's queries made of ours."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cp: Axis) -> torch.Tensor:
        ctx.cp = cp
        local = local.contiguous()
        gathered = [torch.empty_like(local) for _ in range(cp.size)]
        dist.all_gather(gathered, local, group=cp.group)
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.cp.group)
        return grad.chunk(ctx.cp.size)[ctx.cp.rank], None
