"""Hand-made batches for tests."""

from __future__ import annotations

import torch

from megarl.core.batch import MicroBatch


def microbatch(sequences: list[torch.Tensor], prompt_length: int = 1) -> MicroBatch:
    """Sequences packed in the given order; everything after the prompt counts in the loss."""
    lengths = torch.tensor([len(s) for s in sequences])
    total = int(lengths.sum())
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return MicroBatch(
        token_ids=torch.cat(sequences),
        positions=positions,
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32),
        loss_mask=(positions >= prompt_length).float(),
        rollout_logprobs=torch.zeros(total),
        newest_mask=(positions >= prompt_length).float(),
        sample_index=torch.arange(len(sequences)),
        engine_index=torch.zeros(len(sequences), dtype=torch.int64),
        scores=torch.zeros(len(sequences)),
        rewards=torch.zeros(len(sequences)),
        credit=torch.zeros(len(sequences)),
        loss_weight=(positions >= prompt_length).float() / total,
        sample_weight=torch.ones(len(sequences)),
        sft_weight=torch.zeros(len(sequences)),
    )
