"""Packing: nothing lost, nothing twice, budgets kept, and the same maths in every layout."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.algorithms import LossAggregation
from megarl.core import wire
from megarl.core.batch import MicroBatch, MiniBatch, TrainBatch
from megarl.core.sample import Group, Prompt, Sample
from megarl.data.pack import PackPlan, pack

PROMPT = Prompt("p", "", np.zeros(1, np.int64))
AGGREGATIONS: list[LossAggregation] = ["token-mean", "sequence-mean-token-sum", "sequence-mean-token-mean"]


def make_sample(length: int, num_loss_tokens: int, reward: float | None = 1.0) -> Sample:
    """Distinct token ids and log-probs, so that a mix-up shows."""
    mask = np.zeros(length, np.int8)
    mask[length - num_loss_tokens :] = 1
    generator = np.random.default_rng(length * 1000 + num_loss_tokens)
    logprobs = -generator.random(length, dtype=np.float32) * mask
    return Sample(generator.integers(0, 1000, length), mask, logprobs, "stop", reward=reward, advantage=length / 8)


@st.composite
def group_lists(draw: st.DrawFn) -> list[Group]:
    groups = []
    for _ in range(draw(st.integers(1, 6))):
        lengths = draw(st.lists(st.integers(1, 40), min_size=0, max_size=5))
        groups.append(Group(PROMPT, [make_sample(length, draw(st.integers(0, length - 1))) for length in lengths]))
    return groups


plans = st.builds(
    PackPlan,
    dp_size=st.integers(1, 4),
    num_minibatches=st.integers(1, 4),
    max_tokens_per_microbatch=st.integers(8, 100),
    loss_aggregation=st.sampled_from(AGGREGATIONS),
    same_count=st.booleans(),
    count_multiple=st.integers(1, 3),
    attention_cost=st.sampled_from([0.0, 0.01]),
)


def all_samples(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]


def ranks_of_minibatch(batches: list[TrainBatch], position: int) -> list[MiniBatch]:
    return [batch.minibatches[position] for batch in batches]


def sequences(micro: MicroBatch) -> list[tuple[int, slice]]:
    edges = micro.cu_seqlens.tolist()
    spans = [slice(start, end) for start, end in pairwise(edges)]
    return list(zip(micro.sample_index.tolist(), spans, strict=True))


@given(group_lists(), plans)
@settings(deadline=None)
def test_every_sample_travels_exactly_once_and_unharmed(groups: list[Group], plan: PackPlan) -> None:
    samples = all_samples(groups)
    batches = pack(groups, plan)
    assert len(batches) == plan.dp_size
    seen = []
    for batch in batches:
        for micro in batch.microbatches():
            for row, (index, span) in enumerate(sequences(micro)):
                if index < 0:
                    continue
                seen.append(index)
                sample = samples[index]
                assert micro.token_ids[span].tolist() == sample.token_ids.tolist()
                assert micro.loss_mask[span].tolist() == sample.loss_mask.tolist()
                assert micro.rollout_logprobs[span].tolist() == sample.rollout_logprobs.tolist()
                assert micro.positions[span].tolist() == list(range(len(sample.token_ids)))
                assert micro.rewards[row].item() == sample.reward
                assert micro.credit[row].item() == sample.advantage
    assert sorted(seen) == list(range(len(samples)))


@given(group_lists(), plans)
@settings(deadline=None)
def test_budgets_are_kept_and_every_rank_has_work(groups: list[Group], plan: PackPlan) -> None:
    batches = pack(groups, plan)
    num_full_groups = sum(1 for group in groups if group.samples)
    for batch in batches:
        assert len(batch.minibatches) == min(plan.num_minibatches, num_full_groups)
        for minibatch in batch.minibatches:
            assert minibatch.microbatches
            assert len(minibatch.microbatches) % plan.count_multiple == 0
            for micro in minibatch.microbatches:
                assert micro.num_tokens <= plan.max_tokens_per_microbatch or micro.num_sequences == 1
    if plan.same_count:
        for ranks in zip(*(batch.minibatches for batch in batches), strict=True):
            assert len({len(minibatch.microbatches) for minibatch in ranks}) == 1


@given(group_lists(), plans)
@settings(deadline=None)
def test_fillers_are_silent_alone_and_last(groups: list[Group], plan: PackPlan) -> None:
    for batch in pack(groups, plan):
        for minibatch in batch.minibatches:
            filled = [bool((micro.sample_index < 0).any()) for micro in minibatch.microbatches]
            assert filled == sorted(filled)
            for micro in (micro for micro, is_filler in zip(minibatch.microbatches, filled, strict=True) if is_filler):
                assert micro.num_sequences == 1
                for tensor in (micro.loss_mask, micro.loss_weight, micro.rollout_logprobs, micro.rewards, micro.credit):
                    assert not tensor.any()


@given(group_lists(), plans, st.integers(1, 4), st.integers(8, 100))
@settings(deadline=None)
def test_the_layout_changes_neither_membership_nor_weights(
    groups: list[Group], plan: PackPlan, dp_size: int, budget: int
) -> None:
    other = PackPlan(dp_size, plan.num_minibatches, budget, plan.loss_aggregation)

    def weights(batches: list[TrainBatch]) -> list[dict[int, list[float]]]:
        return [
            {
                index: micro.loss_weight[span].tolist()
                for minibatch in ranks_of_minibatch(batches, position)
                for micro in minibatch.microbatches
                for index, span in sequences(micro)
                if index >= 0
            }
            for position in range(len(batches[0].minibatches))
        ]

    assert weights(pack(groups, plan)) == weights(pack(groups, other))


@given(group_lists(), plans)
@settings(deadline=None)
def test_weights_of_an_optimizer_step(groups: list[Group], plan: PackPlan) -> None:
    samples = all_samples(groups)
    batches = pack(groups, plan)
    for position in range(len(batches[0].minibatches)):
        ranks = ranks_of_minibatch(batches, position)
        micros = [micro for minibatch in ranks for micro in minibatch.microbatches]
        members = [index for micro in micros for index, _ in sequences(micro) if index >= 0]
        num_tokens = sum(samples[index].num_response_tokens for index in members)
        num_trained = sum(samples[index].num_response_tokens > 0 for index in members)
        for minibatch in ranks:
            assert (minibatch.num_loss_tokens, minibatch.num_sequences) == (num_tokens, len(members))
        total = sum(micro.loss_weight.double().sum().item() for micro in micros)
        expected = {
            "token-mean": float(num_tokens > 0),
            "sequence-mean-token-sum": num_tokens / max(1, num_trained),
            "sequence-mean-token-mean": float(num_trained > 0),
        }[plan.loss_aggregation]
        # Each weight is rounded to float32 once: a relative error of at most 2**-24 each, so of the sum too.
        assert total == pytest.approx(expected, rel=2**-23, abs=0)
        for micro in micros:
            assert (micro.loss_weight[micro.loss_mask == 0] == 0).all()
            assert torch.isfinite(micro.loss_weight).all()


@pytest.mark.parametrize(
    ("aggregation", "short", "long"),
    [
        ("token-mean", 1 / 8, 1 / 8),
        ("sequence-mean-token-sum", 1 / 2, 1 / 2),
        ("sequence-mean-token-mean", 1 / 4, 1 / 12),
    ],
)
def test_weights_by_hand(aggregation: LossAggregation, short: float, long: float) -> None:
    """Responses of 2, 6 and 0 tokens; the empty one counts in no denominator."""
    groups = [Group(PROMPT, [make_sample(4, 2), make_sample(9, 6), make_sample(3, 0)])]
    (batch,) = pack(groups, PackPlan(1, 1, 100, aggregation))
    (micro,) = batch.microbatches()
    by_index = {index: micro.loss_weight[span].tolist() for index, span in sequences(micro)}
    assert by_index[0] == pytest.approx([0, 0, short, short], rel=2**-24)  # rounded to float32 once
    assert by_index[1] == pytest.approx([0, 0, 0] + [long] * 6, rel=2**-24)
    assert by_index[2] == [0, 0, 0]


def test_minibatches_take_whole_groups_in_order() -> None:
    groups = [Group(PROMPT, [make_sample(5, 2), make_sample(6, 3)]) for _ in range(5)]
    batches = pack(groups, PackPlan(1, 2, 1000))
    members = [
        sorted(index for micro in minibatch.microbatches for index, _ in sequences(micro))
        for minibatch in batches[0].minibatches
    ]
    assert members == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]


def test_nothing_to_pack_is_no_minibatch() -> None:
    for groups in ([], [Group(PROMPT, [])]):
        assert [batch.minibatches for batch in pack(groups, PackPlan(2, 3, 100))] == [[], []]


def test_an_unscored_sample_has_no_reward() -> None:
    (batch,) = pack([Group(PROMPT, [make_sample(4, 2, reward=None)])], PackPlan(1, 1, 100))
    (micro,) = batch.microbatches()
    assert torch.isnan(micro.rewards).all()


@given(group_lists(), plans)
@settings(deadline=None, max_examples=20)
def test_batches_survive_the_wire(groups: list[Group], plan: PackPlan) -> None:
    for batch in pack(groups, plan):
        tree = batch.to_tree()
        again = TrainBatch.from_tree(wire.decode(wire.encode(tree)), torch.device("cpu"))
        assert wire.encode(again.to_tree()) == wire.encode(tree)
