"""From scored groups to packed tensors, one `TrainBatch` per data-parallel rank.

The layout never changes the maths: which samples share an optimizer step, and how much each token counts in it, depend
on the order of the samples alone. The rest of a `PackPlan` only decides where, and in which company, a sequence is
computed (see `data.plan`). Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.config.algorithms import LossAggregation
from megarl.core.batch import MicroBatch, MiniBatch, TrainBatch
from megarl.core.sample import Group, Sample
from megarl.data.plan import PackPlan, plan_minibatch

__all__ = ["FILLER", "PackPlan", "pack"]

FILLER = -1


class _Origin(NamedTuple):
    """Where the step's samples come from."""

    newest_version: int
    engines: tuple[str, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> _Origin:
        versions = [sample.version for sample in samples]
        versions += [span.version for sample in samples for span in sample.spans]
        return cls(max(versions, default=0), tuple(sorted({sample.engine for sample in samples} - {""})))

    def number(self, sample: Sample) -> int:
        """Of the server that served the sample, from 1; 0: none did."""
        return self.engines.index(sample.engine) + 1 if sample.engine else 0

    def is_newest(self, sample: Sample) -> NDArray[np.float32]:
        """[tokens] 1 where the policy sampled the token with the newest weights."""
        own = np.flatnonzero(sample.loss_mask)
        spans = sample.spans or ((sample.version, 0, len(own)),)
        marked = np.zeros(len(sample.token_ids), dtype=np.float32)
        for version, start, stop in spans:
            if version == self.newest_version:
                marked[own[start:stop]] = 1
        return marked


class _Placed(NamedTuple):
    """A sample on its way into a microbatch."""

    sample: Sample
    sample_index: int  # position in the step's list of samples, or FILLER
    token_weight: float  # how much each of its loss tokens counts
    sample_weight: float = 0.0  # how much more than others it counts in the policy's loss
    sft_weight: float = 0.0  # how much each of its loss tokens counts among those of its kind, good or bad


def pack(groups: Sequence[Group], plan: PackPlan) -> list[TrainBatch]:
    """One batch per data-parallel rank, all with the same number of minibatches.

    Groups stay whole and in order. With fewer groups than minibatches, each group gets its own minibatch and the rest
    is left out: an optimizer step without samples would still move the weights by momentum.
    """
    origin = _Origin.of([sample for group in groups for sample in group.samples])
    batches = [TrainBatch(engines=origin.engines) for _ in range(plan.dp_size)]
    first_index = 0
    for part in _split_groups([group for group in groups if group.samples], plan.num_minibatches):
        samples = [sample for group in part for sample in group.samples]
        for batch, minibatch in zip(batches, _pack_minibatch(samples, first_index, origin, plan), strict=True):
            batch.minibatches.append(minibatch)
        first_index += len(samples)
    return batches


def _split_groups(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Consecutive parts whose numbers of groups differ by at most one; none is empty."""
    num_parts = min(num_parts, len(groups))
    edges = [len(groups) * part // num_parts for part in range(num_parts + 1)] if num_parts else []
    return [groups[start:end] for start, end in pairwise(edges)]


def _pack_minibatch(samples: Sequence[Sample], first_index: int, origin: _Origin, plan: PackPlan) -> list[MiniBatch]:
    """Every rank's share of one optimizer step."""
    num_loss_tokens = np.array([sample.num_response_tokens for sample in samples], dtype=np.int64)
    weights = _token_weights(num_loss_tokens, plan.loss_aggregation)
    sample_weights = _sample_weights(samples)
    sft_weights = _sft_weights(samples, num_loss_tokens)
    sequences = [
        _Placed(
            sample,
            first_index + position,
            float(weights[position]),
            float(sample_weights[position]),
            float(sft_weights[position]),
        )
        for position, sample in enumerate(samples)
    ]
    lengths = [len(sample.token_ids) for sample in samples]
    silent = _filler(samples)
    return [
        MiniBatch(
            [_build([sequences[index] for index in microbatch.tolist()] or [silent], origin) for microbatch in share],
            int(num_loss_tokens.sum()),
            len(samples),
        )
        for share in plan_minibatch(lengths, plan)
    ]


def _token_weights(num_loss_tokens: NDArray[np.int64], aggregation: LossAggregation) -> NDArray[np.float64]:
    """What one loss token of each sequence counts. Denominators are those of the minibatch over all ranks."""
    num_sequences = max(1, int((num_loss_tokens > 0).sum()))
    if aggregation == "token-mean":
        return np.full(len(num_loss_tokens), 1 / max(1, int(num_loss_tokens.sum())))
    if aggregation == "sequence-mean-token-sum":
        return np.full(len(num_loss_tokens), 1 / num_sequences)
    return 1 / (np.maximum(num_loss_tokens, 1) * num_sequences)


def _sample_weights(samples: Sequence[Sample]) -> NDArray[np.float64]:
    """The samples' weights, scaled to mean 1 over the minibatch on all ranks."""
    weights = np.array([sample.weight for sample in samples], dtype=np.float64)
    total = weights.sum()
    return weights * (len(weights) / total) if total > 0 else weights


def _sft_weights(samples: Sequence[Sample], num_loss_tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """1 / (loss tokens of all good samples of the minibatch) for good ones, of all others for the others.

    A sample is good if its score is above 0; one without any score is not.
    """
    is_good = np.array([sample.reward is not None and sample.reward > 0 for sample in samples], dtype=np.bool_)
    counts = {good: max(1, int(num_loss_tokens[is_good == good].sum())) for good in (True, False)}
    return np.where(is_good, 1 / counts[True], 1 / counts[False])


def _filler(samples: Sequence[Sample]) -> _Placed:
    """A copy of the shortest sequence that earns nothing and trains nothing."""
    shortest = min(samples, key=lambda sample: len(sample.token_ids))
    silent = Sample(
        token_ids=shortest.token_ids,
        loss_mask=np.zeros_like(shortest.loss_mask),
        rollout_logprobs=np.zeros_like(shortest.rollout_logprobs),
        finish=shortest.finish,
        reward=0.0,
    )
    return _Placed(silent, FILLER, 0.0)


def _build(sequences: Sequence[_Placed], origin: _Origin) -> MicroBatch:
    samples = [sequence.sample for sequence in sequences]
    lengths = np.array([len(sample.token_ids) for sample in samples], dtype=np.int64)
    loss_mask = np.concatenate([sample.loss_mask for sample in samples], dtype=np.float32)
    token_weights = np.repeat([sequence.token_weight for sequence in sequences], lengths)
    # A sample that nobody scored (supervised learning) has no reward; NaN makes its use by mistake visible.
    scores = [np.nan if sample.reward is None else sample.reward for sample in samples]
    rewards = [
        score if sample.shaped_reward is None else sample.shaped_reward
        for sample, score in zip(samples, scores, strict=True)
    ]
    return MicroBatch(
        token_ids=torch.from_numpy(np.concatenate([sample.token_ids for sample in samples], dtype=np.int64)),
        positions=torch.from_numpy(np.concatenate([np.arange(length, dtype=np.int64) for length in lengths])),
        cu_seqlens=torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        loss_mask=torch.from_numpy(loss_mask),
        rollout_logprobs=torch.from_numpy(
            np.concatenate([sample.rollout_logprobs for sample in samples], dtype=np.float32)
        ),
        newest_mask=torch.from_numpy(np.concatenate([origin.is_newest(sample) for sample in samples])),
        sample_index=torch.tensor([sequence.sample_index for sequence in sequences], dtype=torch.int64),
        engine_index=torch.tensor([origin.number(sample) for sample in samples], dtype=torch.int64),
        scores=torch.tensor(scores, dtype=torch.float32),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        credit=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        loss_weight=torch.from_numpy((loss_mask * token_weights).astype(np.float32)),
        sample_weight=torch.tensor([sequence.sample_weight for sequence in sequences], dtype=torch.float32),
        sft_weight=torch.tensor([sequence.sft_weight for sequence in sequences], dtype=torch.float32),
    )
