"""Slots, queues and groups change nothing but the speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import EngineError
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.generation.embedded import EmbeddedEngine
from tests.unit.embedded_models import VOCAB_SIZE, make_engine, make_model, make_requests

MODEL = make_model("qwen2")
STOPS = tuple(range(1, VOCAB_SIZE, 12))  # often enough that responses end early, at very different lengths


def assert_same(found: Sequence[Generation], expected: Sequence[Generation]) -> None:
    """Tokens are equal; log-probs to rounding (another BLAS may sum in another order for another batch)."""
    assert [generation.id for generation in found] == [generation.id for generation in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish == other.finish
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=0)


def one_at_a_time(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return [generation for request in requests for generation in engine.generate([request])]


def test_two_hundred_mixed_prompts_on_16_slots_equal_one_at_a_time() -> None:
    params = [
        SamplingParams(24, stop_token_ids=STOPS),
        SamplingParams(40, temperature=0.7),
        SamplingParams(32, temperature=1.3, top_p=0.9, stop_token_ids=STOPS[:2]),
        SamplingParams(16, top_k=7),
        SamplingParams(20, temperature=0.0, stop_token_ids=STOPS),
    ]
    requests = [
        dataclasses.replace(request, params=params[index % len(params)])
        for index, request in enumerate(make_requests(200, params[0]))
    ]
    together = make_engine(MODEL, num_slots=16).generate(requests)
    assert_same(together, one_at_a_time(make_engine(MODEL, num_slots=1), requests))
    lengths = {len(generation.token_ids) for generation in together}
    assert len(lengths) > 10  # the schedule had something to do
    assert {generation.finish for generation in together} == {"stop", "length"}


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_requests_that_share_experts_do_not_share_numbers(family: str) -> None:
    model = make_model(family)
    requests = make_requests(40, SamplingParams(24, stop_token_ids=STOPS[:2]))
    together = make_engine(model, num_slots=16).generate(requests)
    assert_same(together, one_at_a_time(make_engine(model, num_slots=1), requests))


@given(order=st.permutations(range(14)), num_slots=st.integers(1, 15))
@settings(max_examples=25, deadline=None)
def test_order_and_number_of_slots_do_not_matter(order: list[int], num_slots: int) -> None:
    requests = make_requests(14, SamplingParams(12, stop_token_ids=STOPS))
    # groups of two, and one sample that has the very same seed as its neighbour
    requests = [
        dataclasses.replace(request, token_ids=requests[i // 2 * 2].token_ids) for i, request in enumerate(requests)
    ]
    requests[3] = dataclasses.replace(requests[3], seed=requests[2].seed)
    expected = make_engine(MODEL, num_slots=4).generate(requests)
    shuffled = make_engine(MODEL, num_slots=num_slots).generate([requests[index] for index in order])
    assert_same(shuffled, [expected[index] for index in order])
    assert expected[2].token_ids.tolist() == expected[3].token_ids.tolist()


@pytest.mark.parametrize("num_slots", [1, 3, 5, 8, 64])
def test_the_prompt_of_a_group_is_prefilled_once(num_slots: int) -> None:
    """Also when the group does not fit into the slots, and its first samples are long gone when its last one starts."""
    prompts = make_requests(6, SamplingParams(10, stop_token_ids=STOPS))
    requests = [
        dataclasses.replace(prompts[index % 6], id=str(index), seed=index)  # the group's members are not neighbours
        for index in range(6 * 8)
    ]
    engine = make_engine(MODEL, num_slots)
    grouped = engine.generate(requests)
    assert engine.num_prefilled_tokens == sum(len(prompt.token_ids) for prompt in prompts)
    assert_same(grouped, one_at_a_time(make_engine(MODEL, 1), requests))
    assert len({tuple(generation.token_ids) for generation in grouped}) > 24  # seeds make samples differ


def test_an_engine_keeps_nothing_from_call_to_call() -> None:
    engine = make_engine(MODEL)
    requests = make_requests(9, SamplingParams(16))
    first = engine.generate(requests)
    engine.generate(make_requests(30, SamplingParams(60), seed=5))
    assert_same(engine.generate(requests), first)


def test_responses_end_at_a_stop_token_or_at_the_limit() -> None:
    engine = make_engine(MODEL, num_slots=7)
    free = engine.generate(make_requests(20, SamplingParams(30)))
    assert all(generation.finish == "length" and len(generation.token_ids) == 30 for generation in free)
    stopped = engine.generate(make_requests(20, SamplingParams(30, stop_token_ids=STOPS)))
    for longer, shorter in zip(free, stopped, strict=True):
        stops = [index for index, token in enumerate(longer.token_ids) if token in STOPS]
        length = stops[0] + 1 if stops else 30
        assert shorter.token_ids.tolist() == longer.token_ids[:length].tolist()
        assert shorter.finish == ("stop" if stops else "length")
        assert len(shorter.logprobs) == length
        assert shorter.logprobs.dtype == np.float32
        assert shorter.token_ids.dtype == np.int64


def test_a_stop_token_as_the_very_last_token_is_a_stop() -> None:
    engine = make_engine(MODEL)
    [request] = make_requests(1, SamplingParams(5))
    [free] = engine.generate([request])
    last = int(free.token_ids[-1])
    first_time = free.token_ids.tolist().index(last) + 1
    params = SamplingParams(first_time, stop_token_ids=(last,))
    [generation] = engine.generate([dataclasses.replace(request, params=params)])
    assert (generation.finish, len(generation.token_ids)) == ("stop", first_time)


def test_sequences_may_fill_the_pool_exactly() -> None:
    engine = make_engine(MODEL, num_slots=2, max_sequence_length=30)
    prompt = np.arange(2, 22)
    [generation] = engine.generate([GenerationRequest("full", prompt, 0, SamplingParams(10))])
    assert len(generation.token_ids) == 10
    with pytest.raises(EngineError, match=r"MRL-5101 request 'big': 20 prompt tokens \+ max_new_tokens 11 = 31.* 30"):
        engine.generate([GenerationRequest("big", prompt, 0, SamplingParams(11))])


@pytest.mark.parametrize("ids", [[], [5, VOCAB_SIZE], [-1]])
def test_prompts_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    request = GenerationRequest("odd", np.array(ids, dtype=np.int64), 0, SamplingParams(3))
    with pytest.raises(EngineError, match="MRL-5106 request 'odd'"):
        make_engine(MODEL).generate([request])


def test_no_requests_give_no_results_and_bad_parameters_are_refused() -> None:
    engine = make_engine(MODEL)
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="max_new_tokens=0"):
        engine.generate(make_requests(1, SamplingParams(0)))
