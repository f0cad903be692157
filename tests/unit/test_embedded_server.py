"""The embedded engine speaks SGLang's routes in a process of its own, and gives the bits of one in this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.core.protocols import GenerationRequest, SamplingParams
from tests.unit.embedded_models import make_engine, make_model, make_requests
from tests.unit.embedded_servers import ADMIN_KEY, API_KEY, Client, port_of, running, settings_of, start

MODEL = make_model("qwen3")
LONG = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 240}, "return_logprob": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[Client]:
    with running(settings_of(MODEL), family="qwen3") as client:
        yield client


@pytest.fixture
def client(shared: Client) -> Iterator[Client]:
    yield shared
    shared.control("/continue_generation")
    shared.control("/abort_request", {"abort_all": True})
    shared.wait_for_load(0)


def body_of(request: GenerationRequest, **changes: Any) -> dict[str, Any]:
    params = request.params
    sampling = {
        "max_new_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
        "top_k": params.top_k or -1, "stop_token_ids": list(params.stop_token_ids), "sampling_seed": request.seed,
    }  # fmt: skip
    return {
        "rid": request.id, "input_ids": request.token_ids.tolist(), "sampling_params": sampling,
        "return_logprob": True, **changes,
    }  # fmt: skip


def generate(client: Client, body: Any) -> Any:
    status, answer = client.call("POST", "/generate", body)
    assert status == 200, answer
    return answer


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(30),
        SamplingParams(30, temperature=0.0),
        SamplingParams(30, temperature=0.7, top_k=9, stop_token_ids=(3, 30, 60, 90)),
        SamplingParams(30, top_p=0.8),
    ],
)
def test_answers_are_those_of_an_engine_in_this_process(client: Client, params: SamplingParams) -> None:
    requests = make_requests(8, params)
    expected = make_engine(MODEL).generate(requests)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: generate(client, body_of(request)), requests))
    for request, other, answer in zip(requests, expected, answers, strict=True):
        meta, num_tokens = answer["meta_info"], len(other.token_ids)
        assert answer["text"] == ""
        assert answer["output_ids"] == other.token_ids.tolist()
        assert np.array([entry[0] for entry in meta["output_token_logprobs"]], np.float32).tobytes() == (
            other.logprobs.tobytes()
        )
        assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in other.token_ids]
        assert meta["id"] == request.id
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(request.token_ids), num_tokens)
        assert meta["weight_version"] == "1"
        assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": num_tokens}]
        assert meta["e2e_latency"] > 0
        if other.finish == "stop":
            assert meta["finish_reason"] == {"type": "stop", "matched": int(other.token_ids[-1])}
        else:
            assert meta["finish_reason"] == {"type": "length", "length": num_tokens}


def test_a_batch_is_answered_in_its_order(client: Client) -> None:
    requests = make_requests(6, SamplingParams(11))
    expected = make_engine(MODEL).generate(requests)
    bodies = [body_of(request) for request in requests]
    batch = {name: [body[name] for body in bodies] for name in ("rid", "input_ids", "sampling_params")}
    answers = generate(client, batch)
    assert [answer["output_ids"] for answer in answers] == [other.token_ids.tolist() for other in expected]
    assert [answer["meta_info"]["id"] for answer in answers] == [request.id for request in requests]
    assert "output_token_logprobs" not in answers[0]["meta_info"]
    [one] = generate(client, {"input_ids": [[5, 6]], "rid": "name", "sampling_params": {"max_new_tokens": 1}})
    assert one["meta_info"]["id"] == "name_0"


def test_what_is_not_said_has_a_default(client: Client) -> None:
    first, second = (generate(client, {"input_ids": [5, 6], "rid": "same"}) for _ in range(2))
    other = generate(client, {"input_ids": [5, 6]})
    assert len(first["output_ids"]) == 128
    assert first["output_ids"] == second["output_ids"]  # the seed comes from the id
    assert other["output_ids"] != first["output_ids"]
    assert other["meta_info"]["id"]
    stops = {"max_new_tokens": 20, "stop_token_ids": list(range(101))}
    assert len(generate(client, {"input_ids": [5], "sampling_params": stops})["output_ids"]) == 1
    assert (
        len(generate(client, {"input_ids": [5], "sampling_params": stops | {"ignore_eos": True}})["output_ids"]) == 20
    )


BAD_BODIES: list[Any] = [
    b"{", b"[1, 2]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, {}, {"text": "hello"}, {"input_ids": []},
    {"input_ids": "abc"}, {"input_ids": [1.5]}, {"input_ids": [True]}, {"input_ids": [101]}, {"input_ids": [-1]},
    {"input_ids": [10**30]}, {"input_ids": [[1], 2]}, {"input_ids": [[1], []]}, {"input_ids": [5] * 300},
    {"input_ids": [5], "rid": 7}, {"input_ids": [[5], [6]], "rid": ["a", "a"]}, {"input_ids": [[5]], "rid": ["a", "b"]},
    {"input_ids": [5], "stream": True}, {"input_ids": [5], "logprob_start_len": 0},
    {"input_ids": [5], "return_routed_experts": True}, {"input_ids": [5], "no_such_field": 1},
    {"input_ids": [5], "sampling_params": []}, {"input_ids": [5], "sampling_params": 3},
    *(
        {"input_ids": [5], "sampling_params": params}
        for params in (
            {"max_new_tokens": 0}, {"max_new_tokens": -1}, {"max_new_tokens": 10**9}, {"max_new_tokens": "9"},
            {"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": "hot"},
            {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}, {"top_k": -2}, {"top_k": 1.5}, {"n": 2}, {"min_p": 0.1},
            {"stop": ["x"]}, {"stop_token_ids": 3}, {"stop_token_ids": ["3"]}, {"stop_token_ids": [10**30]},
            {"sampling_seed": "x"}, {"ignore_eos": 1}, {"repetition_penalty": 1.2}, {"json_schema": "{}"},
        )
    ),
]  # fmt: skip


def test_bad_bodies_are_refused_with_a_message_and_hurt_nobody(client: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(generate, client, LONG | {"rid": "long"})
        client.wait_for_load(1)
        for body in BAD_BODIES:
            status, answer = client.call("POST", "/generate", body)
            assert status == 400, (body, answer)
            assert answer["error"]["message"], body
        # fewer tokens would end it before the last bad body
        assert len(long.result()["output_ids"]) == 240
    for path, body in (
        ("/pause_generation", {"mode": "softly"}), ("/abort_request", {"rid": 3}), ("/abort_request", b"["),
        ("/release_memory_occupation", {"tags": ["everything"]}), ("/release_memory_occupation", {"tags": "weights"}),
        ("/weights_checker", {"action": "guess"}), ("/continue_generation", b"[]"),
    ):  # fmt: skip
        status, answer = client.control(path, body)
        assert status == 400, (path, body, answer)
        assert answer["error"]["message"]
    status, answer = client.call("POST", "/generate", b" " * (65 * 2**20))
    assert (status, answer["error"]["message"]) == (413, "Request Entity Too Large")
    assert client.call("GET", "/no_such_route", key=ADMIN_KEY)[0] == 404


def test_an_id_is_served_once_at_a_time(client: Client) -> None:
    client.control("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(generate, client, {"input_ids": [5], "rid": "twin"})
        client.wait_for_load(0, 1)
        status, answer = client.call("POST", "/generate", {"input_ids": [5], "rid": "twin"})
        assert (status, "Duplicate" in answer["error"]["message"]) == (400, True)
        client.control("/continue_generation")
        assert len(first.result()["output_ids"]) == 128


CONTROL = (
    "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache", "/release_memory_occupation",
    "/resume_memory_occupation", "/weights_checker", "/begin_weight_update",
)  # fmt: skip


def test_keys_guard_the_routes(client: Client) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        assert client.call("GET", path, key=None) == (200, "")
    for path in ("/model_info", "/server_info", "/v1/loads"):
        assert client.call("GET", path, key=API_KEY)[0] == 200
        for wrong in (None, "", ADMIN_KEY, "the api ke", "the api key2", "ü"):
            assert client.call("GET", path, key=wrong)[0] == 401
    assert client.call("POST", "/generate", {"input_ids": [5]}, key=None)[0] == 401
    for path in CONTROL:
        for wrong in (None, API_KEY, "wrong"):
            status, answer = client.call("POST", path, {}, key=wrong)
            assert (status, answer) == (401, {"error": {"message": "Unauthorized"}})


def test_it_says_what_it_is(client: Client) -> None:
    info = client.call("GET", "/server_info")[1]
    assert info["engine"] == "megarl-embedded"
    assert info["version"]
    assert API_KEY not in json.dumps(info)
    model = client.call("GET", "/model_info")[1]
    assert (model["weight_version"], model["architectures"]) == ("1", ["Qwen3ForCausalLM"])
    checksum = client.control("/weights_checker", {"action": "checksum"})[1]["checksum"]
    assert int(checksum, 16) == make_engine(MODEL).checksum()


def test_abort_gives_partial_output(client: Client) -> None:
    client.control("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(generate, client, LONG | {"rid": f"a{index}"}) for index in range(6)]
        client.wait_for_load(0, 6)
        client.control("/abort_request", {"rid": "a2"})
        aborted = futures[2].result()
        assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
        assert (aborted["output_ids"], aborted["meta_info"]["output_token_logprobs"]) == ([], [])
        client.control("/abort_request", {"rid": ""})  # nobody's
        client.control("/continue_generation")
        client.wait_for_load(4, 1)
        assert client.control("/flush_cache")[0] == 400
        assert client.control("/release_memory_occupation")[0] == 400
        client.control("/pause_generation", {"mode": "abort"})
        for future in futures:
            answer = future.result()
            entries = answer["meta_info"]["output_token_logprobs"]
            assert [entry[1] for entry in entries] == answer["output_ids"]
            assert len(answer["output_ids"]) < 240
    assert client.control("/flush_cache")[0] == 200
    client.control("/continue_generation")


def test_pauses_change_no_token(client: Client) -> None:
    body = LONG | {"rid": "paused", "sampling_params": {"max_new_tokens": 240, "temperature": 0}}
    expected = generate(client, body)["output_ids"]
    for mode in ("in_place", "retract"):
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(generate, client, body)
            client.wait_for_load(1)
            assert client.control("/pause_generation", {"mode": mode})[1]["status"] == "ok"
            client.wait_for_load(*((1, 0) if mode == "in_place" else (0, 1)))
            assert not future.done()
            client.control("/continue_generation", {})
            assert future.result()["output_ids"] == expected


def test_a_client_that_goes_away_ends_its_request(client: Client) -> None:
    client.control("/pause_generation", {"mode": "in_place"})
    connections = [client.open("POST", "/generate", LONG | {"rid": f"gone{i}"}, API_KEY) for i in range(2)]
    client.wait_for_load(0, 2)
    connections[0].close()
    client.wait_for_load(0, 1)
    client.control("/continue_generation")
    assert connections[1].getresponse().status == 200
    connections[1].close()


def test_a_server_without_weights_is_healthy_but_not_ready() -> None:
    with running(settings_of(MODEL, api_key=None, admin_key=None)) as client:
        assert client.call("GET", "/health", key=None)[0] == 200
        assert [client.call("GET", path, key=None)[0] for path in ("/ready", "/health_generate")] == [503, 503]
        assert client.call("GET", "/model_info", key=None)[1]["weight_version"] == "0"
        status, answer = client.call("POST", "/generate", {"input_ids": [5]}, key=None)
        assert (status, answer["error"]["message"][:8]) == (503, "MRL-5105")
        assert client.call("POST", "/release_memory_occupation", {"tags": ["kv_cache"]}, key=None) == (200, None)
        assert client.call("POST", "/resume_memory_occupation", {}, key=None) == (200, None)
        assert client.call("POST", "/abort_request", {"abort_all": True}, key=None)[0] == 200


@pytest.mark.parametrize("change", [{"dtype": "float8"}, {"num_slots": 0}, {"colour": "red"}, {"model_config": {}}])
def test_bad_settings_end_with_a_message_that_holds_no_key(change: dict[str, Any]) -> None:
    process = start(settings_of(MODEL) | change)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (64, 69)
    assert (out, "Traceback" in err, API_KEY in err, "MRL-" in err) == ("", False, False, True)


def test_it_ends_on_sigterm() -> None:
    process = start(settings_of(MODEL))
    port_of(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


def test_it_ends_with_its_parent() -> None:
    program = (
        "import sys\nfrom tests.unit.embedded_servers import *\nimport json\nchild = start(json.loads(sys.argv[1]))"
    )
    program += "\nport_of(child)\nprint(child.pid, flush=True)\nsys.stdin.read()"
    parent = subprocess.Popen(
        [sys.executable, "-c", program, json.dumps(settings_of(MODEL))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert psutil.wait_procs([child], timeout=30)[1] == []


def test_the_server_imports_neither_megatron_nor_transformers() -> None:
    program = (
        "import sys, megarl.generation.embedded.serve; print('megatron' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
