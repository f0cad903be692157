"""What every engine promises, the one inside this process and servers alike (`core.protocols.Engine`)."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch

from megarl.core.checksum import combine, tensor_checksum
from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.protocols import Engine, Generation, GenerationRequest, PauseMode, SamplingParams
from tests.conformance.subjects import ADMIN_KEY, API_KEY, Subject
from tests.unit.embedded_models import VOCAB_SIZE, hf_logprobs, make_requests, parameters_of

GREEDY = SamplingParams(16, temperature=0.0)
LONG = SamplingParams(200, temperature=0.0)
HANG_SECONDS = 60.0
# fp32 of two libraries
CLOSE = 1e-4


def request_of(name: str, params: SamplingParams, seed: int = 11) -> GenerationRequest:
    return GenerationRequest(name, np.array([5, 6, 7]), seed, params)


def tokens_of(generations: Sequence[Generation]) -> list[list[int]]:
    return [generation.token_ids.tolist() for generation in generations]


def attempts(engine: Engine, *names: str) -> Iterator[Future[list[Generation]]]:
    """Long requests that another thread waits for, and that have drawn some tokens. Machines differ: whoever comes too
    early or too late tries again.
    """
    pool = ThreadPoolExecutor(1)
    try:
        for num_beside in (2, 1, 1, 0, 1, 0, 2, 0, 1, 0):
            running = pool.submit(engine.generate, [request_of(name, LONG) for name in names])
            # these come after it, and are drawn beside it
            for number in range(num_beside):
                engine.generate([request_of(f"beside-{number}", SamplingParams(4))])
            yield running
            running.result()
    finally:
        pool.shutdown(wait=False)


def test_a_response_ends_at_its_limit_or_at_a_stop_token(subject: Subject) -> None:
    stops = (3, 30, 60, 90)
    requests = [
        *make_requests(12, SamplingParams(20, stop_token_ids=stops)),
        request_of("one", SamplingParams(1)),
        request_of("endless", SamplingParams(40)),
        request_of("at once", SamplingParams(40, stop_token_ids=tuple(range(VOCAB_SIZE)))),
    ]
    generations = subject.engine.generate(requests)
    assert [generation.id for generation in generations] == [request.id for request in requests]
    for request, generation in zip(requests, generations, strict=True):
        tokens = generation.token_ids
        assert len(tokens) == len(generation.logprobs) and generation.logprobs.dtype == np.float32
        assert (generation.logprobs <= 0).all() and np.isfinite(generation.logprobs).all()
        assert ((tokens >= 0) & (tokens < VOCAB_SIZE)).all()
        assert not np.isin(tokens[:-1], request.params.stop_token_ids).any()
        if tokens[-1] in request.params.stop_token_ids:
            assert generation.finish == "stop"
        else:
            assert (generation.finish, len(tokens)) == ("length", request.params.max_new_tokens)
        assert (generation.version, generation.spans) == (subject.version, ())
    assert {generation.finish for generation in generations[:12]} == {"stop", "length"}
    assert [len(generation.token_ids) for generation in generations[12:]] == [1, 40, 1]


def test_greedy_is_the_argmax_of_transformers(subject: Subject) -> None:
    subject.need("model")
    requests = make_requests(6, GREEDY)
    for request, generation in zip(requests, subject.engine.generate(requests), strict=True):
        ids = torch.from_numpy(np.concatenate([request.token_ids, generation.token_ids]))
        with torch.no_grad():
            logits = subject.model(input_ids=ids[None]).logits[0, len(request.token_ids) - 1 : -1]
        assert generation.token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(24),
        GREEDY,
        SamplingParams(24, temperature=0.6),
        SamplingParams(24, temperature=1.4, top_k=5),
        SamplingParams(24, top_p=0.7),
    ],
)
def test_logprobs_are_those_of_transformers(subject: Subject, params: SamplingParams) -> None:
    """At the request's temperature, of the whole vocabulary: before top-k and top-p cut it."""
    subject.need("model")
    requests = make_requests(6, params)
    for request, generation in zip(requests, subject.engine.generate(requests), strict=True):
        expected = hf_logprobs(subject.model, request.token_ids, generation.token_ids, params.temperature or 1.0)
        assert np.abs(generation.logprobs - expected.numpy()).max() < CLOSE


def test_top_k_and_top_p_leave_the_best_tokens(subject: Subject) -> None:
    subject.need("model")
    greedy = tokens_of(subject.engine.generate(make_requests(4, GREEDY)))
    for params in (SamplingParams(16, top_k=1), SamplingParams(16, top_p=1e-6)):
        assert tokens_of(subject.engine.generate(make_requests(4, params))) == greedy


def test_a_seed_gives_the_same_tokens_again(subject: Subject) -> None:
    subject.need("seeds")
    params = SamplingParams(16)
    requests = make_requests(6, params)
    first = tokens_of(subject.engine.generate(requests))
    assert tokens_of(subject.engine.generate(requests[::-1])) == first[::-1]
    one, other = subject.engine.generate([request_of("a", params, 1), request_of("b", params, 2)])
    assert one.token_ids.tolist() != other.token_ids.tolist()


def test_abort_gives_what_there_is(subject: Subject) -> None:
    whole = subject.engine.generate([request_of("whole", LONG)])[0].token_ids.tolist()
    for running in attempts(subject.engine, "ended", "goes on"):
        subject.engine.abort(["nobody's", "ended"])
        ended, other = running.result()
        if 0 < len(ended.token_ids) < 200:
            break
    assert (ended.finish, other.finish) == ("abort", "length")
    assert 0 < len(ended.token_ids) < 200 and len(ended.logprobs) == len(ended.token_ids)
    assert ended.token_ids.tolist() == whole[: len(ended.token_ids)]
    assert other.token_ids.tolist() == whole
    for running in attempts(subject.engine, "a", "b"):
        subject.engine.abort()
        finishes = [generation.finish for generation in running.result()]
        if finishes[0] == "abort":
            break
    assert finishes == ["abort", "abort"]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_changes_no_token(subject: Subject, mode: PauseMode) -> None:
    whole = tokens_of(subject.engine.generate([request_of("whole", LONG)]))
    for running in attempts(subject.engine, "paused"):
        subject.engine.pause(mode)
        time.sleep(0.2)  # that nothing happens can only be waited for
        if not running.done():
            break
        subject.engine.continue_generation()
    with ThreadPoolExecutor(1) as pool:
        new = pool.submit(subject.engine.generate, [request_of("new", GREEDY)])
        time.sleep(0.1)
        assert not running.done() and not new.done()
        subject.engine.continue_generation()
        assert tokens_of(running.result()) == whole
        assert tokens_of(new.result()) == [whole[0][:16]]


def test_a_pause_can_end_what_runs(subject: Subject) -> None:
    for running in attempts(subject.engine, "ended"):
        subject.engine.pause("abort")
        [ended] = running.result()
        subject.engine.continue_generation()
        if 0 < len(ended.token_ids) < 200:
            break
    assert ended.finish == "abort" and 0 < len(ended.token_ids) < 200
    subject.engine.continue_generation()  # nothing happens
    assert subject.engine.generate([request_of("next", GREEDY)])[0].finish == "length"


def test_new_weights_have_their_version_and_their_tokens(subject: Subject) -> None:
    requests = make_requests(4, SamplingParams(24, temperature=0.0))
    before = subject.engine.generate(requests)
    version = subject.push(1.3)
    assert subject.engine.version == version
    after = subject.engine.generate(requests)
    assert {generation.version for generation in after} == {version}
    assert {generation.version for generation in before} == {version - 1}
    assert tokens_of(before) != tokens_of(after)
    if "model" not in subject.lacks:
        for request, generation in zip(requests, after, strict=True):
            expected = hf_logprobs(subject.model, request.token_ids, generation.token_ids, 1.0)
            assert np.abs(generation.logprobs - expected.numpy()).max() < CLOSE


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_request_may_be_drawn_by_two_versions(subject: Subject, mode: PauseMode) -> None:
    for running in attempts(subject.engine, "both"):
        subject.engine.pause(mode)
        version = subject.push(0.9)
        subject.engine.continue_generation()
        [both] = running.result()
        if both.spans:
            break
    assert (both.finish, len(both.token_ids), both.version) == ("length", 200, version - 1)
    old, new = both.spans
    assert (old.version, old.start, new.version, new.stop) == (version - 1, 0, version, 200)
    assert 0 < old.stop == new.start < 200
    if "model" not in subject.lacks:
        expected = hf_logprobs(subject.model, request_of("", LONG).token_ids, both.token_ids, 1.0).numpy()
        assert np.abs(both.logprobs - expected)[: old.stop].max() > CLOSE  # other weights drew these
        if mode == "retract":  # what was drawn before is prefilled anew, so that the new weights alone decide
            assert np.abs(both.logprobs - expected)[new.start :].max() < CLOSE


def test_released_memory_comes_back(subject: Subject) -> None:
    requests = make_requests(4, GREEDY)
    expected = tokens_of(subject.engine.generate(requests))
    subject.engine.release("kv_cache")
    if "release" not in subject.lacks:
        with pytest.raises((EngineError, EngineFault)):
            subject.engine.generate(requests)
    subject.engine.release("weights")
    subject.engine.resume("weights")
    subject.engine.resume("kv_cache")
    version = subject.push()
    again = subject.engine.generate(requests)
    if "model" not in subject.lacks:
        assert tokens_of(again) == expected
    assert {generation.version for generation in again} == {version}


BAD = {
    "no prompt": GenerationRequest("bad", np.array([], np.int64), 1, GREEDY),
    "a token beyond the vocabulary": GenerationRequest("bad", np.array([5, VOCAB_SIZE]), 1, GREEDY),
    "a negative token": GenerationRequest("bad", np.array([5, -1]), 1, GREEDY),
    "a prompt that is too long": GenerationRequest("bad", np.full(400, 5), 1, GREEDY),
    "a negative temperature": request_of("bad", SamplingParams(4, temperature=-1.0)),
    "too large a top_p": request_of("bad", SamplingParams(4, top_p=1.5)),
}


def test_bad_requests_are_refused_and_harm_nobody(subject: Subject) -> None:
    whole = tokens_of(subject.engine.generate([request_of("whole", LONG)]))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(subject.engine.generate, [request_of("unharmed", LONG)])
        for what, bad in BAD.items():
            if "model" in subject.lacks and what.split()[-1] in ("long", "temperature", "top_p"):
                continue  # of no interest to one that draws numbers
            with pytest.raises((EngineError, EngineFault, ValueError)):
                subject.engine.generate([bad])
        try:
            assert tokens_of(running.result(HANG_SECONDS)) == whole
        finally:
            subject.engine.abort()  # a request that hangs must not take the suite along


def test_an_incomplete_update_is_told(subject: Subject) -> None:
    subject.need("completeness")
    subject.engine.begin_weight_update()
    subject.engine.update_weights(parameters_of(subject.model)[1:])
    with pytest.raises((EngineError, EngineFault), match="never arrived"):
        subject.engine.end_weight_update(subject.version + 1)
    with pytest.raises((EngineError, EngineFault)):
        subject.engine.generate([request_of("r", GREEDY)])
    if subject.url is None:  # here the update goes on until it is complete
        subject.engine.update_weights(parameters_of(subject.model)[:1])
        subject.version += 1
        subject.engine.end_weight_update(subject.version)
    else:
        subject.push()
    assert subject.engine.generate([request_of("r", GREEDY)])[0].version == subject.version


def test_the_checksum_is_the_trainers(subject: Subject) -> None:
    subject.need("checksum")
    subject.push()
    sent = combine(tensor_checksum(name, tensor) for name, tensor in parameters_of(subject.model))
    assert subject.engine.checksum() == sent


def status_of(url: str, method: str, path: str, key: str | None, body: Any = None) -> int:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    headers = {"Content-Type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_keys_guard_a_server(subject: Subject) -> None:
    if subject.url is None:
        pytest.skip("it does not listen")
    ask = {"input_ids": [5, 6], "rid": "keys", "sampling_params": {"max_new_tokens": 1}}
    for key in (None, "wrong", API_KEY[:-1]):
        assert status_of(subject.url, "POST", "/generate", key, ask) in (401, 403)
        assert status_of(subject.url, "GET", "/model_info", key) in (401, 403)
    assert status_of(subject.url, "POST", "/generate", API_KEY, ask) == 200
    assert status_of(subject.url, "GET", "/health", None) == 200
    for route in ("/pause_generation", "/abort_request", "/update_weights_from_disk", "/release_memory_occupation"):
        for key in (None, "wrong", API_KEY):
            assert status_of(subject.url, "POST", route, key, {}) in (401, 403), route
    assert status_of(subject.url, "POST", "/continue_generation", ADMIN_KEY, {}) == 200
