"""Requests come, pause, go on and end while others run, and nobody notices but themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megarl.core.errors import EngineError
from megarl.core.protocols import Generation, GenerationRequest, PauseMode, SamplingParams
from megarl.core.sample import VersionSpan
from megarl.generation.embedded import EmbeddedEngine
from megarl.generation.embedded.worker import EngineWorker
from tests.unit.embedded_models import load, make_engine, make_model, make_requests, parameters_of

MODEL = make_model("qwen3")
GREEDY = SamplingParams(40, temperature=0.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As every rank and server has: with more, torch's sums depend on how many rows share the batch."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps(engine: EmbeddedEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def finish(engine: EmbeddedEngine) -> None:
    while engine.can_step:
        engine.step()


def same(one: Generation, other: Generation) -> bool:
    return (
        one.token_ids.tobytes() == other.token_ids.tobytes()
        and one.logprobs.tobytes() == other.logprobs.tobytes()
        and one.finish == other.finish
    )


def other_model() -> torch.nn.Module:
    model = make_model("qwen3")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flip(0))
    return model


def test_requests_that_come_one_by_one_draw_the_same_bits() -> None:
    requests = make_requests(12, SamplingParams(30))
    expected = make_engine(MODEL).generate(requests)
    engine = make_engine(MODEL)
    futures = []
    for request in requests:
        futures += engine.add([request])
        steps(engine, 3)
    finish(engine)
    assert all(same(future.result(), other) for future, other in zip(futures, expected, strict=True))
    assert (engine.num_running, engine.num_waiting) == (0, 0)


def test_a_group_that_comes_one_by_one_before_a_step_is_prefilled_once() -> None:
    engine = make_engine(MODEL, num_slots=3)
    prompt = np.arange(2, 19)
    for index in range(7):
        engine.add([GenerationRequest(str(index), prompt, index, SamplingParams(5))])
    finish(engine)
    assert engine.num_prefilled_tokens == len(prompt)


def test_what_came_first_is_not_overtaken_for_ever() -> None:
    """Longer requests go first only among those of the same moment."""
    engine = make_engine(MODEL, num_slots=1)
    [short] = engine.add([GenerationRequest("short", np.arange(2, 4), 0, SamplingParams(3))])
    engine.add(make_requests(1, SamplingParams(50)))
    for seed in range(1, 200):
        engine.add(make_requests(1, SamplingParams(50), seed=seed))
        engine.step()
        if short.done():
            break
    assert short.done()


@pytest.mark.parametrize("slots", [2, 8])
def test_aborted_requests_give_what_they_have(slots: int) -> None:
    requests = make_requests(5, SamplingParams(30))
    expected = make_engine(MODEL).generate(requests)
    engine = make_engine(MODEL, num_slots=slots)
    futures = engine.add(requests)
    steps(engine, 4)
    engine.abort(["r1", "r3", "nobody"])
    for index in (1, 3):
        generation = futures[index].result(timeout=0)
        count = len(generation.token_ids)
        assert generation.finish == "abort"
        assert count in (0, 4)
        assert generation.token_ids.tolist() == expected[index].token_ids[:count].tolist()
        assert generation.logprobs.tobytes() == expected[index].logprobs[:count].tobytes()
    assert {len(futures[index].result().token_ids) for index in (1, 3)} <= ({4} if slots == 8 else {0, 4})
    finish(engine)
    assert all(same(futures[index].result(), expected[index]) for index in (0, 2, 4))


def test_one_that_has_not_begun_gives_no_tokens() -> None:
    engine = make_engine(MODEL)
    [future] = engine.add(make_requests(1, SamplingParams(5)))
    engine.abort()
    generation = future.result(timeout=0)
    assert (len(generation.token_ids), len(generation.logprobs)) == (0, 0)
    assert (generation.finish, generation.version, generation.spans) == ("abort", 1, ())


def test_a_refused_request_lets_nobody_of_its_call_in_and_hurts_no_other() -> None:
    engine = make_engine(MODEL)
    [good] = make_requests(1, SamplingParams(8))
    expected = make_engine(MODEL).generate([good])
    [future] = engine.add([good])
    engine.step()
    for bad in (
        GenerationRequest("long", np.arange(2, 60), 0, SamplingParams(90)),
        GenerationRequest("empty", np.zeros(0, dtype=np.int64), 0, SamplingParams(3)),
        GenerationRequest("odd", np.arange(2, 5), 0, SamplingParams(3, top_p=0.0)),
    ):
        with pytest.raises((EngineError, ValueError)):
            engine.add([good, bad])
    assert engine.num_running + engine.num_waiting == 1
    finish(engine)
    assert same(future.result(), expected[0])


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(40)])
def test_a_pause_changes_nothing(mode: PauseMode, params: SamplingParams) -> None:
    requests = make_requests(7, params)
    expected = make_engine(MODEL).generate(requests)
    engine = make_engine(MODEL)
    futures = engine.add(requests)
    steps(engine, 9)
    engine.pause(mode)
    assert (engine.num_running, engine.num_waiting) == ((0, 7) if mode == "retract" else (4, 3))
    steps(engine, 3)
    assert not any(future.done() for future in futures)
    engine.continue_generation()
    steps(engine, 5)
    engine.pause(mode)
    engine.continue_generation()
    finish(engine)
    for future, other in zip(futures, expected, strict=True):
        assert future.result().token_ids.tolist() == other.token_ids.tolist()
        # a prompt that is computed anew sums in another order
        np.testing.assert_allclose(future.result().logprobs, other.logprobs, atol=1e-5, rtol=0)
        assert future.result().spans == ()


def test_pause_by_abort_ends_all_and_lets_new_ones_wait() -> None:
    engine = make_engine(MODEL)
    futures = engine.add(make_requests(6, GREEDY))
    steps(engine, 2)
    engine.pause("abort")
    assert [len(future.result(timeout=0).token_ids) for future in futures].count(2) == 4
    late = engine.add(make_requests(1, GREEDY))
    engine.step()
    assert engine.num_waiting == 1
    engine.continue_generation()
    finish(engine)
    assert late[0].result().finish == "length"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_new_weights_in_a_pause_draw_the_rest_under_their_version(mode: PauseMode) -> None:
    engine, changed = make_engine(MODEL), other_model()
    requests = make_requests(6, GREEDY)
    before = make_engine(MODEL).generate(requests)
    futures = engine.add(requests)
    steps(engine, 10)
    engine.pause(mode)
    load(engine, changed, version=5)
    engine.continue_generation()
    finish(engine)
    generations = [future.result() for future in futures]
    begun = [generation for generation in generations if generation.spans]
    assert len(begun) == 4
    for generation, old, request in zip(generations, before, requests, strict=True):
        if not generation.spans:  # it had not begun: only the new weights drew
            assert generation.version == 5
            assert same(generation, make_engine(changed).generate([request])[0])
            continue
        assert generation.spans == (VersionSpan(1, 0, 10), VersionSpan(5, 10, 40))
        assert generation.version == 1
        assert generation.token_ids[:10].tolist() == old.token_ids[:10].tolist()
        assert generation.token_ids[10:].tolist() != old.token_ids[10:].tolist()
        if mode == "retract":  # the new weights read the whole sequence anew
            sequence = np.concatenate([request.token_ids, generation.token_ids[:10]])
            rest = GenerationRequest("rest", sequence, 0, SamplingParams(30, temperature=0.0))
            [fresh] = make_engine(changed).generate([rest])
            assert generation.token_ids[10:].tolist() == fresh.token_ids.tolist()


def test_the_rest_of_a_group_begins_with_the_new_weights() -> None:
    """Its prompt was kept for it, but computed by the old ones."""
    engine, changed = make_engine(MODEL, num_slots=2), other_model()
    prompt = np.arange(2, 20)
    requests = [GenerationRequest(str(index), prompt, index, SamplingParams(12)) for index in range(4)]
    futures = engine.add(requests)
    steps(engine, 3)
    engine.pause("in_place")
    load(engine, changed, version=2)
    engine.continue_generation()
    finish(engine)
    for index in (2, 3):
        assert same(futures[index].result(), make_engine(changed).generate([requests[index]])[0])


def test_running_requests_forbid_updates_and_releases_until_they_are_paused() -> None:
    engine = make_engine(MODEL)
    engine.add(make_requests(2, GREEDY))
    engine.step()
    for refuse in (engine.begin_weight_update, lambda: engine.release("kv_cache"), lambda: engine.release("weights")):
        with pytest.raises(EngineError, match=r"MRL-5109 .*2 requests are running.*pause"):
            refuse()
    engine.pause("in_place")
    with pytest.raises(EngineError, match=r"MRL-5109 .*paused in place"):
        engine.release("kv_cache")
    engine.pause("retract")
    engine.release("kv_cache")
    engine.resume("kv_cache")
    engine.continue_generation()
    finish(engine)
    assert engine.num_running == 0


def test_requests_that_waited_for_an_engine_without_weights_are_refused_when_it_goes_on() -> None:
    engine = make_engine(MODEL)
    engine.pause("abort")
    engine.release("weights")
    [future] = engine.add(make_requests(1, GREEDY))
    engine.continue_generation()
    with pytest.raises(EngineError, match="MRL-5105"):
        future.result(timeout=0)


def test_one_request_whose_numbers_break_leaves_the_others_alone() -> None:
    model = make_model("qwen3", tied=False)
    requests = make_requests(2, SamplingParams(20))
    expected = make_engine(model).generate(requests)
    used = {*np.concatenate([r.token_ids for r in requests]), *np.concatenate([g.token_ids for g in expected])}
    poison = min(set(range(2, 101)) - used)
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = torch.nan
    engine = make_engine(model, num_slots=3)
    bad = GenerationRequest("bad", np.array([5, poison, 8] * 9), 0, SamplingParams(20))
    futures = engine.add([*requests, bad])
    finish(engine)
    with pytest.raises(EngineError, match="MRL-5107 request 'bad'"):
        futures[2].result()
    again = engine.add(requests)
    finish(engine)
    for future, other in zip([*futures[:2], *again], expected * 2, strict=True):
        assert same(future.result(), other)


def test_other_threads_reach_a_running_generate() -> None:
    engine = make_engine(MODEL, max_sequence_length=4000)
    requests = make_requests(3, SamplingParams(3900))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, requests)
        while engine.num_running < 3:
            pass
        engine.pause("retract")
        assert not running.done()
        load(engine, MODEL, version=2)
        engine.continue_generation()
        engine.abort(["r0"])
        engine.pause("in_place")
        engine.abort()
        generations = running.result()
    engine.continue_generation()
    assert [generation.finish for generation in generations] == ["abort"] * 3
    assert all(0 < len(generation.token_ids) < 3900 for generation in generations)
    assert all(generation.version == 1 for generation in generations)


def test_a_worker_serves_calls_and_sleeps() -> None:
    worker = EngineWorker(make_engine(MODEL))
    requests = make_requests(9, SamplingParams(25))
    expected = make_engine(MODEL).generate(requests)
    threads = {worker.call(threading.get_ident).result()}
    assert threading.get_ident() not in threads
    futures = [worker.submit(request) for request in requests]
    refused = worker.submit(GenerationRequest("none", np.zeros(0, dtype=np.int64), 0, SamplingParams(3)))
    with pytest.raises(EngineError, match="MRL-5106"):
        refused.result()
    assert all(same(future.result(), other) for future, other in zip(futures, expected, strict=True))
    assert worker.call(worker.engine.checksum).result() == make_engine(MODEL).checksum()
    with pytest.raises(EngineError, match="MRL-5102"):
        worker.call(lambda: _broken_update(worker.engine)).result()
    worker.call(lambda: worker.engine.pause("in_place"))
    unfinished = worker.submit(requests[0])
    worker.close()
    assert unfinished.result(timeout=0).finish == "abort"


def _broken_update(engine: EmbeddedEngine) -> None:
    engine.begin_weight_update()
    engine.update_weights([("no such parameter", parameters_of(MODEL)[0][1])])
