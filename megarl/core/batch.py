"""What a training step is made of: packed tensors, without padding.

A :class:`MicroBatch` is one forward pass: sequences laid end to end in ``[T]`` tensors, with ``cu_seqlens`` marking
where each starts (Megatron's THD layout). All ``[T]`` tensors are aligned to the *token*, as in `core.sample`;
``[B]`` tensors hold one number per sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch


@dataclass(slots=True)
class MicroBatch:
    """One packed forward pass of ``B`` sequences with ``T`` tokens in all."""

    # -- what was generated
    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, restarting at 0 with each sequence
    cu_seqlens: torch.Tensor  # [B+1] int32
    loss_mask: torch.Tensor  # [T] float32, 1 where the policy sampled the token
    rollout_logprobs: torch.Tensor  # [T] float32, what the engine said
    newest_mask: torch.Tensor  # [T] float32, 1 where the newest weights of the step's samples drew the token
    sample_index: torch.Tensor  # [B] int64, position in the step's list of samples; -1 is filler without any loss
    engine_index: torch.Tensor  # [B] int64, number of the server, from 1, in `TrainBatch.engines`; 0 is none
    # -- what it earned
    scores: torch.Tensor  # [B] float32, what the reward function gave the whole sequence
    rewards: torch.Tensor  # [B] float32, the same after normalisation and clipping
    credit: torch.Tensor  # [B] float32, the scalar of `Algorithm.credit_groups`
    # -- how much each token counts: the loss of an optimizer step is sum(loss_weight * token loss) over all ranks
    loss_weight: torch.Tensor  # [T] float32
    # -- how much each sequence counts in the policy's loss: 1 on average over an optimizer step
    sample_weight: torch.Tensor  # [B] float32
    # -- 1 / (loss tokens of the optimizer step's sequences with a score above 0, or of the others: those like this one)
    sft_weight: torch.Tensor  # [B] float32
    # -- what the models said before the update (annotate)
    old_logprobs: torch.Tensor | None = None  # [T]
    entropy: torch.Tensor | None = None  # [T]
    ref_logprobs: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    # -- what the algorithm made of it (credit_tokens)
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]

    @property
    def num_tokens(self) -> int:
        """All tokens, prompts included."""
        return self.token_ids.numel()

    @property
    def num_sequences(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def sequence_of_token(self) -> torch.Tensor:
        """[T] int64: which sequence a token belongs to."""
        lengths = (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).long()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)

    def to_tree(self) -> dict[str, np.ndarray]:
        """Arrays for `core.wire`."""
        present = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: tensor.cpu().numpy() for name, tensor in present if tensor is not None}

    @classmethod
    def from_tree(cls, tree: dict[str, np.ndarray], device: torch.device) -> MicroBatch:
        """The inverse of `to_tree`."""
        return cls(**{name: torch.from_numpy(array).to(device) for name, array in tree.items()})


# A microbatch's columns with one number per sequence, and those with one number per token: all but the boundaries.
SEQUENCE_COLUMNS = ("sample_index", "engine_index", "scores", "rewards", "credit", "sample_weight", "sft_weight")
TOKEN_COLUMNS = tuple(f.name for f in fields(MicroBatch) if f.name not in (*SEQUENCE_COLUMNS, "cu_seqlens"))


@dataclass(slots=True)
class MiniBatch:
    """This rank's share of one optimizer step. The counts are global: over all data-parallel ranks."""

    microbatches: list[MicroBatch]
    num_loss_tokens: int
    num_sequences: int


@dataclass(slots=True)
class TrainBatch:
    """This rank's share of one training step, cut into optimizer steps.

    ``engines`` are the names of the servers that served any of the step's samples, on all ranks alike.
    """

    minibatches: list[MiniBatch] = field(default_factory=list)
    engines: tuple[str, ...] = ()

    def microbatches(self) -> Iterator[MicroBatch]:
        """All micro-batches of the step, in order."""
        for minibatch in self.minibatches:
            yield from minibatch.microbatches

    def to_tree(self) -> dict[str, Any]:
        """Plain data and arrays for `core.wire`."""
        minibatches = [
            {
                "microbatches": [micro.to_tree() for micro in mini.microbatches],
                "num_loss_tokens": mini.num_loss_tokens,
                "num_sequences": mini.num_sequences,
            }
            for mini in self.minibatches
        ]
        return {"minibatches": minibatches, "engines": list(self.engines)}

    @classmethod
    def from_tree(cls, tree: dict[str, Any], device: torch.device) -> TrainBatch:
        """The inverse of `to_tree`."""
        minibatches = [
            MiniBatch(
                [MicroBatch.from_tree(micro, device) for micro in mini["microbatches"]],
                mini["num_loss_tokens"],
                mini["num_sequences"],
            )
            for mini in tree["minibatches"]
        ]
        return cls(minibatches, tuple(tree["engines"]))
