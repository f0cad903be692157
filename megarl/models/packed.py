"""A micro-batch as Megatron wants it: padded where the layout asks for it, and cut to this rank's share of the tokens.

Context parallelism cuts every sequence into 2 x cp_size equal pieces and gives rank r the pieces r and (last - r), so
that the causal triangle is shared evenly; sequences are padded to a multiple of that. Sequence parallelism splits the
packed tokens evenly over the tensor-parallel ranks, and interleaved pipelines want equal lengths; a last sequence of
padding makes up the rest. Otherwise nothing is padded. Padding comes after a sequence's own tokens, so causality keeps
it out of their sight; what a model says about padding is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.core.batch import MicroBatch
from megarl.core.world import Axis
from megarl.models.layout import Layout
from megarl.models.local_layers import PackedSequences, Zigzag, pack_sequences


@dataclass(frozen=True, slots=True)
class PackedMicroBatch:
    """One forward pass on this rank."""

    micro: MicroBatch
    sequences: PackedSequences
    # [this rank's tokens] int64
    token_ids: torch.Tensor
    # [this rank's tokens] int64: where each is among the micro-batch's tokens; padding points to any token
    token_index: torch.Tensor
    # [T] int64: where each of the micro-batch's tokens is in the concatenation of all context ranks' outputs
    output_index: torch.Tensor
    cp: Axis
    # tokens of all context ranks, padding included
    size: int

    def to_tokens(self, outputs: torch.Tensor) -> torch.Tensor:
        """``[..., T]`` from this rank's ``[..., local tokens]``: the other ranks' added, padding dropped.

        Every context rank gets the same result and takes the same loss of it, so the gradient that comes back to a
        rank's own outputs is already whole. Collective over the context-parallel ranks.
        """
        if self.cp.size > 1:
            outputs = _GatherOutputs.apply(outputs.contiguous(), self.cp)  # type: ignore[no-untyped-call]
        return outputs[..., self.output_index]


def pack_microbatches(microbatches: Sequence[MicroBatch], layout: Layout) -> list[PackedMicroBatch]:
    """Pad and cut micro-batches for this rank of the layout.

    The stages of an interleaved pipeline do not tell each other the lengths of what they send (Megatron's way to do so
    mixes up the two neighbours of a rank when they are the same one), so there all micro-batches get one length.
    """
    longest = max(_padded_size(micro, layout) for micro in microbatches) if layout.parallel.vpp_size > 1 else 0
    return [_pack(micro, layout, max(longest, _padded_size(micro, layout))) for micro in microbatches]


def _padded_lengths(micro: MicroBatch, layout: Layout) -> list[int]:
    multiple = 2 * layout.parallel.cp_size if layout.parallel.cp_size > 1 else 1
    return [-(-length // multiple) * multiple for length in (micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]).tolist()]


def _padded_size(micro: MicroBatch, layout: Layout) -> int:
    """Tokens of the padded whole: even parts for all context ranks, and for all tensor ranks that share a sequence."""
    parallel = layout.parallel
    multiple = parallel.cp_size * math.lcm(
        2 if parallel.cp_size > 1 else 1, parallel.tp_size if parallel.sequence_parallel else 1
    )
    return -(-sum(_padded_lengths(micro, layout)) // multiple) * multiple


def _pack(micro: MicroBatch, layout: Layout, size: int) -> PackedMicroBatch:
    """``size``: tokens of the padded whole."""
    cp = layout.world.cp
    device = micro.cu_seqlens.device
    lengths = (micro.cu_seqlens[1:] - micro.cu_seqlens[:-1]).tolist()
    padded = _padded_lengths(micro, layout)
    rest = size - sum(padded)
    if padded == lengths and not rest and cp.size == 1:
        here = torch.arange(micro.num_tokens, device=device)
        return PackedMicroBatch(micro, pack_sequences(micro.cu_seqlens), micro.token_ids, here, here, cp, size)
    padded_lengths = torch.tensor([*padded, *([rest] if rest else [])])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), padded_lengths.cumsum(0)])
    # where every real token is in the padded whole, and which token stands at every padded place
    place = torch.cat([start + torch.arange(length) for start, length in zip(starts.tolist(), lengths, strict=False)])
    token_at = torch.zeros(int(starts[-1]), dtype=torch.int64)
    token_at[place] = torch.arange(len(place))
    held = [_pieces(starts, rank, cp.size) for rank in range(cp.size)]
    position_of = torch.empty(int(starts[-1]), dtype=torch.int64)
    position_of[torch.cat(held)] = torch.arange(int(starts[-1]))
    token_index = token_at[held[cp.rank]].to(device)
    zigzag = Zigzag(cp, held[cp.rank], position_of) if cp.size > 1 else None
    sequences = pack_sequences(starts.to(device, torch.int32), zigzag)
    return PackedMicroBatch(
        micro, sequences, micro.token_ids[token_index], token_index, position_of[place].to(device), cp, size
    )


def _pieces(starts: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The padded places that context rank ``rank`` holds, sequence by sequence."""
    places = []
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        piece = (end - start) // (2 * size) if size > 1 else end - start
        first, last = start + rank * piece, end - (rank + 1) * piece
        places.append(torch.arange(first, first + piece))
        if size > 1:
            places.append(torch.arange(last, last + piece))
    return torch.cat(places)


class _GatherOutputs(torch.autograd.Function):
    """All-gather along the last dimension; backward keeps this rank's part (see `PackedMicroBatch.to_tokens`)."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, cp: Axis) -> torch.Tensor:
        ctx.cp = cp
        gathered = [torch.empty_like(outputs) for _ in range(cp.size)]
        dist.all_gather(gathered, outputs, group=cp.group)
        return torch.cat(gathered, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.cp.size, dim=-1)[ctx.cp.rank], None
