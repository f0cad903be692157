"""One packed pass over micro-batches through Megatron's pipeline schedules, forward only or with gradients.

The schedule is Megatron's own (no pipelining, 1F1B, or interleaved 1F1B), so the same three functions serve every
layout. The layout must be active.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megarl.core import whereabouts
from megarl.core.batch import MicroBatch
from megarl.core.world import World
from megarl.models.layout import Layout
from megarl.models.packed import PackedMicroBatch, pack_microbatches

# the last stage's output for one micro-batch, [local tokens, columns] -> whatever the caller wants of it
Read = Callable[[torch.Tensor, PackedMicroBatch], torch.Tensor]


def forward_only(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[MicroBatch], read: Read, layout: Layout
) -> list[torch.Tensor]:
    """``read`` of every micro-batch's output, on every rank of the replica: ``[k, T]`` tensors, without gradients.

    Only the last stage has outputs; it broadcasts what ``read`` made of them to the other stages. A step without any
    sample has no micro-batch on any rank. Collective.
    """
    if not microbatches:
        return []

    def collect(packed: PackedMicroBatch, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:  # noqa: ARG001
        return read(output[0], packed)

    for chunk in chunks:
        chunk.eval()
    with torch.no_grad():
        results = _run(chunks, microbatches, collect, layout, forward_only=True)
    return _broadcast_from_last_stage(results, microbatches, layout.world)


def forward_backward(
    chunks: Sequence[torch.nn.Module], microbatches: Sequence[MicroBatch], loss: Read, layout: Layout
) -> None:
    """Add the gradients of sum(loss) to the model's gradient buffers, summed over data-parallel ranks. Collective.

    ``loss`` must already hold its global denominator: nothing is averaged here.
    """
    no_tokens = torch.zeros((), dtype=torch.int)

    def scored(packed: PackedMicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return loss(output[0], packed), no_tokens.to(output.device), None

    for chunk in chunks:
        chunk.train()
    _run(chunks, microbatches, scored, layout, forward_only=False)


def sum_gradients(model: list[torch.nn.Module], num_tokens: Any = None, **keywords: Any) -> None:  # noqa: ARG001
    """Megatron's gradient reductions (data parallel, tied embeddings, per-head norms) without its division by
    tokens.
    """
    finalize_model_grads(model, None, **keywords)


def _run(
    chunks: Sequence[torch.nn.Module],
    microbatches: Sequence[MicroBatch],
    consume: Callable[..., Any],
    layout: Layout,
    *,
    forward_only: bool,
) -> list[Any]:
    batches = pack_microbatches(microbatches, layout)

    def forward_step(coming: Iterator[PackedMicroBatch], module: torch.nn.Module) -> Any:
        whereabouts.tick()
        packed = next(coming)
        output = module(
            input_ids=packed.token_ids[None],
            # positions are told by the packing record; rotary embeddings need no more
            position_ids=None,
            attention_mask=None,
            packed_seq_params=packed.sequences,
        )
        return output, partial(consume, packed)

    # every chunk of an interleaved pipeline goes through all micro-batches
    iterators = [iter(batches) for _ in chunks]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks),
        num_microbatches=len(batches),
        # counts in interleaved pipelines only; otherwise the stages tell each other every tensor's shape
        seq_length=batches[0].size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def _broadcast_from_last_stage(
    results: list[torch.Tensor], microbatches: Sequence[MicroBatch], world: World
) -> list[torch.Tensor]:
    if world.pp.size == 1:
        return results
    lengths = [micro.num_tokens for micro in microbatches]
    num_rows = torch.tensor([results[0].size(0) if world.is_last_stage else 0], device=world.device)
    dist.broadcast(num_rows, group=world.pp.group, group_src=world.pp.size - 1)
    if world.is_last_stage:
        flat = torch.cat(results, dim=1)
    else:
        flat = torch.empty(int(num_rows), sum(lengths), device=world.device)
    dist.broadcast(flat, group=world.pp.group, group_src=world.pp.size - 1)
    return list(torch.split(flat, lengths, dim=1))
