"""One packed pass over micro-batches through Megatron's pipeline schedules, forward only or with gradients.

The schedule is Megatron's own (no pipelining, or 1F1B), so the same three functions serve every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megarl.core.batch import MicroBatch
from megarl.core.world import World
from megarl.models.local_layers import PackedSequences, pack_sequences

# the model's output for one micro-batch, squeezed to [T, columns] -> whatever the caller wants of it
Read = Callable[[torch.Tensor, MicroBatch], torch.Tensor]


def forward_only(
    model: torch.nn.Module, microbatches: Sequence[MicroBatch], read: Read, world: World
) -> list[torch.Tensor]:
    """``read`` of every micro-batch's output, on every rank of the replica: ``[k, T]`` tensors, without gradients.

    Only the last stage has outputs; it broadcasts what ``read`` made of them to the other stages. Collective.
    """

    def collect(micro: MicroBatch, output: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:  # noqa: ARG001
        return read(output[0], micro)

    model.eval()
    with torch.no_grad():
        results = _run(model, microbatches, collect, forward_only=True)
    return _broadcast_from_last_stage(results, microbatches, world)


def forward_backward(
    model: torch.nn.Module, microbatches: Sequence[MicroBatch], loss: Callable[[torch.Tensor, MicroBatch], torch.Tensor]
) -> None:
    """Add the gradients of sum(loss) to the model's gradient buffers, summed over data-parallel ranks. Collective.

    ``loss`` must already hold its global denominator: nothing is averaged here.
    """
    no_tokens = torch.zeros((), dtype=torch.int)

    def scored(micro: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return loss(output[0], micro), no_tokens.to(output.device), None

    model.train()
    _run(model, microbatches, scored, forward_only=False)


def sum_gradients(model: list[torch.nn.Module], num_tokens: Any = None, **keywords: Any) -> None:  # noqa: ARG001
    """Megatron's gradient reductions (data parallel, tied embeddings, per-head norms) without its division by
    tokens.
    """
    finalize_model_grads(model, None, **keywords)


def _run(
    model: torch.nn.Module, microbatches: Sequence[MicroBatch], consume: Callable[..., Any], *, forward_only: bool
) -> list[Any]:
    packed = [(micro, pack_sequences(micro.cu_seqlens)) for micro in microbatches]

    def forward_step(batches: Iterator[tuple[MicroBatch, PackedSequences]], module: torch.nn.Module) -> Any:
        micro, sequences = next(batches)
        output = module(
            input_ids=micro.token_ids[None],
            position_ids=micro.positions[None],
            attention_mask=None,
            packed_seq_params=sequences,
        )
        return output, partial(consume, micro)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(packed),
        model=[model],
        num_microbatches=len(packed),
        # lengths vary; with variable_seq_lengths the stages tell each other every tensor's shape
        seq_length=1,
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
