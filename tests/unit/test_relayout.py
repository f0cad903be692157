"""Repacking for another layout: the same minibatches in other hands."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings

from megarl.core import wire
from megarl.core.batch import SEQUENCE_COLUMNS, TOKEN_COLUMNS, MicroBatch, TrainBatch
from megarl.core.sample import Group
from megarl.data.pack import PackPlan, pack
from megarl.data.relayout import repack
from tests.unit.test_pack import group_lists, plans, sequences

ANNOTATIONS = ("old_logprobs", "ref_logprobs", "values", "advantages")


def frames(batches: list[TrainBatch]) -> list[bytes]:
    return [wire.encode(batch.to_tree()) for batch in batches]


def annotate(batches: list[TrainBatch]) -> list[TrainBatch]:
    """Numbers that only the token and its sample decide, as a model's; zero in filler, as the mask makes them."""
    for micro in (micro for batch in batches for micro in batch.microbatches()):
        index = micro.sample_index[micro.sequence_of_token]
        for number, name in enumerate(ANNOTATIONS):
            said = torch.sin(index.float() * 31 + micro.positions + number)
            setattr(micro, name, torch.where(index < 0, 0.0, said))
    return batches


@given(group_lists(), plans, plans)
@settings(deadline=None)
def test_repacked_is_as_if_packed_anew(groups: list[Group], before: PackPlan, after: PackPlan) -> None:
    """Bit for bit, fillers and annotations included."""
    after = replace(after, num_minibatches=before.num_minibatches, loss_aggregation=before.loss_aggregation)
    repacked = repack(annotate(pack(groups, before)), after)
    assert frames(repacked) == frames(annotate(pack(groups, after)))


@given(group_lists(), plans, plans)
@settings(deadline=None)
def test_there_and_back_again(groups: list[Group], before: PackPlan, after: PackPlan) -> None:
    batches = annotate(pack(groups, before))
    assert frames(repack(repack(batches, after), before)) == frames(batches)


def test_repacked_tensors_are_copies() -> None:
    groups = [Group(sample_group().prompt, sample_group().samples)]
    batches = annotate(pack(groups, PackPlan(2, 1, 20)))
    before = frames(batches)
    for micro in (micro for batch in repack(batches, PackPlan(1, 1, 20)) for micro in batch.microbatches()):
        for field in fields(MicroBatch):
            column = getattr(micro, field.name)
            if column is not None:
                column.zero_()
    assert frames(batches) == before


def test_every_column_is_declared() -> None:
    """By its size in a microbatch whose numbers of tokens, sequences and boundaries differ."""
    (batch,) = annotate(pack([sample_group()], PackPlan(1, 1, 1000)))
    (micro,) = batch.microbatches()
    assert len(sequences(micro)) == 3
    names = {field.name for field in fields(MicroBatch)}
    assert {*SEQUENCE_COLUMNS, *TOKEN_COLUMNS, "cu_seqlens"} == names
    for name in names:
        column = getattr(micro, name)
        if column is not None:
            expected = 3 if name in SEQUENCE_COLUMNS else 4 if name == "cu_seqlens" else micro.num_tokens
            assert column.shape == (expected,)


def test_nothing_stays_nothing() -> None:
    assert [batch.minibatches for batch in repack([TrainBatch()] * 2, PackPlan(3, 1, 100))] == [[], [], []]


def test_ranks_with_different_numbers_of_minibatches_are_refused() -> None:
    (batch,) = pack([sample_group()], PackPlan(1, 1, 1000))
    with pytest.raises(ValueError, match="argument 2"):
        repack([batch, TrainBatch()], PackPlan(1, 1, 100))


def sample_group() -> Group:
    from tests.unit.test_pack import PROMPT, make_sample

    return Group(PROMPT, [make_sample(5, 2), make_sample(9, 4), make_sample(7, 7 - 1)])
