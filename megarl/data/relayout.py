"""The same samples for a model with another layout.

A batch is cut for the ranks of the policy. A critic or a reference that is laid out differently over the same ranks
needs the same minibatches in other hands: other data-parallel ranks, other microbatches. What such a model says about
tokens is then carried back to the batch it came from. Every number keeps its bits on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megarl.core.batch import SEQUENCE_COLUMNS, TOKEN_COLUMNS, MicroBatch, MiniBatch, TrainBatch
from megarl.core.protocols import Algorithm, Annotator
from megarl.core.world import World
from megarl.data.distribute import distribute
from megarl.data.pack import FILLER
from megarl.data.plan import PackPlan, plan_minibatch
from megarl.metrics.meter import Meter

# What a filler keeps of the sequence that it copies; it earns nothing and trains nothing.
_KEPT_BY_FILLER = ("token_ids", "positions")


def repack(batches: Sequence[TrainBatch], plan: PackPlan) -> list[TrainBatch]:
    """One batch per data-parallel rank of ``plan`` from one batch per data-parallel rank of any other; on the CPU.

    Minibatches stay what they are: the same samples with the same columns and loss weights. Repacking what `pack` made
    under one plan gives what `pack` makes under the other: the plan's number of minibatches and its loss aggregation
    are decided already, and do not matter here.
    """
    repacked = [TrainBatch(engines=batches[0].engines) for _ in range(plan.dp_size)]
    for minibatches in zip(*(batch.minibatches for batch in batches), strict=True):
        sequences = _Sequences(micro for minibatch in minibatches for micro in minibatch.microbatches)
        for batch, share in zip(repacked, plan_minibatch(sequences.lengths, plan), strict=True):
            microbatches = [sequences.join(rows) if len(rows) else sequences.filler() for rows in share]
            batch.minibatches.append(
                MiniBatch(microbatches, minibatches[0].num_loss_tokens, minibatches[0].num_sequences)
            )
    return repacked


class _Sequences:
    """The real sequences of some microbatches, in the order of the step's samples, ready to be joined anew."""

    def __init__(self, microbatches: Iterable[MicroBatch]) -> None:
        found = list(microbatches)
        boundaries = [micro.cu_seqlens.numpy().astype(np.int64) for micro in found]
        first_tokens = np.cumsum([0, *(micro.num_tokens for micro in found)])[:-1]
        starts = np.concatenate([edges[:-1] + first for edges, first in zip(boundaries, first_tokens, strict=True)])
        lengths = np.concatenate([np.diff(edges) for edges in boundaries])
        sample_index = torch.cat([micro.sample_index for micro in found]).numpy()
        order = np.argsort(sample_index, kind="stable")
        self._rows = order[np.count_nonzero(sample_index == FILLER) :]
        self._starts = starts[self._rows]
        self.lengths = lengths[self._rows]
        self._columns = {
            name: torch.cat([getattr(micro, name) for micro in found])
            for name in (*TOKEN_COLUMNS, *SEQUENCE_COLUMNS)
            if getattr(found[0], name) is not None
        }

    def join(self, chosen: NDArray[np.int64]) -> MicroBatch:
        """A microbatch of the chosen sequences, in their order."""
        lengths = self.lengths[chosen]
        ends = np.cumsum(lengths)
        tokens = torch.from_numpy(_positions_of(self._starts[chosen], lengths))
        rows = torch.from_numpy(self._rows[chosen])
        joined = {name: column[tokens if name in TOKEN_COLUMNS else rows] for name, column in self._columns.items()}
        return MicroBatch(cu_seqlens=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)), **joined)

    def filler(self) -> MicroBatch:
        """A copy of the shortest sequence in which all that is earned, counted or said is zero."""
        micro = self.join(np.array([np.argmin(self.lengths)]))
        for name in self._columns:
            if name not in _KEPT_BY_FILLER:
                getattr(micro, name).zero_()
        micro.sample_index.fill_(FILLER)
        return micro


class Relayout:
    """The way of a batch between two worlds of the same ranks, and of its columns back.

    ``plan`` cuts for the target as ``source_plan`` did for the source.
    """

    def __init__(self, source: World, source_plan: PackPlan, target: World, plan: PackPlan) -> None:
        if target.dp.size != plan.dp_size:
            raise ValueError(f"the plan is for {plan.dp_size} data-parallel ranks, the world has {target.dp.size}")
        self._source = source
        self._target = target
        self._plan = plan
        #: both worlds cut a batch alike, so that it is in the right hands already
        self.identity = source.dp_rank_of == target.dp_rank_of and source_plan.cuts_like(plan)

    def forward(self, batch: TrainBatch) -> TrainBatch:
        """This rank's batch in the target layout. Collective."""
        if self.identity:
            return batch
        trees = self._source.gather(batch.to_tree() if _speaks(self._source) else None)
        if trees is None:
            return distribute(None, self._target)
        cpu = torch.device("cpu")
        batches = [TrainBatch.from_tree(trees[rank], cpu) for rank in _speakers(self._source)]
        return distribute(repack(batches, self._plan), self._target)

    def carry_back(self, own: TrainBatch, batch: TrainBatch, columns: Sequence[str]) -> None:
        """Copy ``columns``, one number per token, that a model filled in ``own``, its batch of the target layout, into
        ``batch``, this rank's batch of the source layout. Filler gets zeros. Collective.
        """
        if self.identity or not batch.minibatches:
            return
        trees = self._source.gather(
            {
                "said": _said(own, columns) if _speaks(self._target) else None,
                "asked": _outline(batch) if _speaks(self._source) else None,
            }
        )
        answers = None
        if trees is not None:
            said = [trees[rank]["said"] for rank in _speakers(self._target)]
            answer_of = [_answer(trees[rank]["asked"], said, columns) for rank in _speakers(self._source)]
            answers = [answer_of[dp_rank] for dp_rank in self._source.dp_rank_of]
        answer = self._source.scatter(answers)
        microbatches = list(batch.microbatches())
        lengths = [micro.num_tokens for micro in microbatches]
        for name in columns:
            parts = torch.split(torch.from_numpy(answer[name]).to(self._source.device), lengths)
            for micro, part in zip(microbatches, parts, strict=True):
                setattr(micro, name, part.clone())


def _speakers(world: World) -> list[int]:
    """The first rank of every data-parallel coordinate: its peers hold the same batch."""
    return [world.dp_rank_of.index(dp_rank) for dp_rank in range(world.dp.size)]


def _speaks(world: World) -> bool:
    return world.rank == world.dp_rank_of.index(world.dp.rank)


def _outline(batch: TrainBatch) -> dict[str, NDArray[Any]]:
    """Which samples a batch holds, in what order, and how long they are."""
    microbatches = list(batch.microbatches())
    indices = [micro.sample_index.cpu() for micro in microbatches]
    lengths = [micro.cu_seqlens.cpu().diff().long() for micro in microbatches]
    return {"sample_index": torch.cat(indices).numpy(), "lengths": torch.cat(lengths).numpy()}


def _said(batch: TrainBatch, columns: Sequence[str]) -> dict[str, NDArray[Any]]:
    """What a model said about the samples of its batch."""
    said = {name: torch.cat([getattr(micro, name).cpu() for micro in batch.microbatches()]) for name in columns}
    return {**_outline(batch), **{name: column.numpy() for name, column in said.items()}}


def _answer(
    asked: dict[str, NDArray[Any]], said: Sequence[dict[str, NDArray[Any]]], columns: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """The columns for the tokens that are asked for, out of what all ranks said."""
    indices = np.concatenate([part["sample_index"] for part in said])
    lengths = np.concatenate([part["lengths"] for part in said])
    order = np.argsort(indices, kind="stable")
    real = asked["sample_index"] != FILLER
    wanted = asked["sample_index"][real]
    places = order[np.minimum(np.searchsorted(indices, wanted, sorter=order), len(order) - 1)]
    if not (np.array_equal(indices[places], wanted) and np.array_equal(lengths[places], asked["lengths"][real])):
        raise ValueError("the two layouts do not hold the same samples: no column can be carried back")
    tokens = _positions_of((np.cumsum(lengths) - lengths)[places], lengths[places])
    of_real_sequence = np.repeat(real, asked["lengths"])
    answer = {}
    for name in columns:
        column = np.concatenate([part[name] for part in said])
        answer[name] = np.zeros(len(of_real_sequence), dtype=column.dtype)
        answer[name][of_real_sequence] = column[tokens]
    return answer


def _positions_of(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions of all tokens of sequences that begin at ``starts``, one sequence after the other."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


class AnnotatingModel(Annotator, Protocol):
    """An annotator that says which columns it fills."""

    columns: tuple[str, ...]


class TrainableModel(AnnotatingModel, Protocol):
    """One that also learns."""

    train_phase: str
    update_timer: str

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step. Collective."""


class AnnotatorElsewhere:
    """A model of another layout that annotates batches of this one."""

    def __init__(self, model: AnnotatingModel, relayout: Relayout) -> None:
        self.forward_phase = model.forward_phase
        self.annotation_timer = model.annotation_timer
        self.columns = model.columns
        self._model = model
        self._relayout = relayout

    def annotate(self, batch: TrainBatch) -> TrainBatch:
        """Fill the model's columns of the batch. Collective."""
        own = self._model.annotate(self._relayout.forward(batch))
        self._relayout.carry_back(own, batch, self.columns)
        return batch


class LearnerElsewhere(AnnotatorElsewhere):
    """A model of another layout that annotates, and learns from, batches of this one."""

    def __init__(self, model: TrainableModel, relayout: Relayout) -> None:
        super().__init__(model, relayout)
        self.train_phase = model.train_phase
        self.update_timer = model.update_timer
        self._learner = model

    def update(self, batch: TrainBatch, algorithm: Algorithm) -> Meter:
        """One training step. Collective.

        The batch travels again: since `annotate`, advantages and returns were added to it.
        """
        return self._learner.update(self._relayout.forward(batch), algorithm)
