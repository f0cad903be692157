"""Whatever a server answers is either the sample that it drew or a fault."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.engine_fault import EngineFault
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import VersionSpan
from megarl.generation.http.answers import Asked, check_answer
from megarl.generation.http.client import EngineClient

REQUEST = GenerationRequest("r1", np.array([5, 6, 7]), 3, SamplingParams(4, stop_token_ids=(1, 2)))
ASKED = Asked(REQUEST, "r1#aa", "http://one", 101)


def good(rid: str = "r1#aa") -> dict[str, Any]:
    return {
        "output_ids": [9, 8, 2],
        "meta_info": {
            "id": rid, "finish_reason": {"type": "stop", "matched": 2}, "prompt_tokens": 3, "completion_tokens": 3,
            "weight_version": "7", "output_token_logprobs": [[-0.5, 9, None], [-1.25, 8, None], [1e-7, 2, None]],
            "weight_versions": [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}],
        },
    }  # fmt: skip


def bits(generation: Generation) -> tuple[Any, ...]:
    tokens, logprobs = generation.token_ids.tobytes(), generation.logprobs.tobytes()
    return tokens, logprobs, generation.finish, generation.version, generation.spans


def test_a_good_answer_is_read():
    read = check_answer(good(), ASKED)
    assert read.id == "r1" and read.finish == "stop" and read.version == 6
    assert read.token_ids.tolist() == [9, 8, 2] and read.logprobs.tolist() == [-0.5, -1.25, 0.0]
    assert read.spans == (VersionSpan(6, 0, 1), VersionSpan(7, 1, 3))


@pytest.mark.parametrize(("last", "finish"), [([2], "stop"), ([8, 9], "length"), ([8], "abort")])
def test_a_response_that_was_at_its_end_when_it_was_aborted_is_finished(last, finish):
    answer = good()
    answer["output_ids"] = tokens = [9, 8, *last]
    answer["meta_info"] |= {
        "finish_reason": {"type": "abort"},
        "completion_tokens": len(tokens),
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": None,
    }
    assert check_answer(answer, ASKED).finish == finish


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(places(good())[1:]), st.booleans(), JUNK)
def test_one_broken_place_is_noticed_or_does_not_matter(place, remove, junk):
    answer = good()
    *way, last = place
    inner: Any = answer
    for key in way:
        inner = inner[key]
    # another number within a log-prob's range is another log-prob: only the weights could tell
    is_logprob = len(place) == 4 and place[1] == "output_token_logprobs" and last == 0 and type(junk) in (int, float)
    if is_logprob and -1e30 < junk <= 1e-3:
        return
    if remove:
        del inner[last]
    else:
        inner[last] = junk
    version_was_changed = "version" in str(last)
    try:
        read = check_answer(answer, ASKED)
    except EngineFault as fault:
        assert fault.kind in ("garbled", "rejected")
        return
    expected = bits(check_answer(good(), ASKED))
    assert bits(read)[:3] == expected[:3]
    assert version_was_changed or bits(read) == expected


@pytest.mark.parametrize("status", [200, 500, 401])
def test_the_client_admits_what_is_right_and_names_the_rest(status):
    """A real server on a real socket; what it is sent is what SGLang understands."""
    seen: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(await request.json() | {"key": request.headers["Authorization"]})
        return web.Response(status=status, text=json.dumps(good(seen[-1]["rid"])) if status == 200 else "key-one")

    async def run() -> Generation:
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        client = EngineClient(f"http://127.0.0.1:{port}", "key-one", "key-two", vocab_size=101)
        try:
            assert "key-" not in repr(client)
            return await client.generate(copy.copy(REQUEST), 10.0)
        finally:
            await client.close()
            await runner.cleanup()

    if status == 200:
        assert bits(asyncio.run(run())) == bits(check_answer(good(), ASKED))
    else:
        with pytest.raises(EngineFault) as caught:
            asyncio.run(run())
        assert caught.value.kind == "refused" and caught.value.status == status
        assert "key-one" not in str(caught.value)
    assert seen[0]["key"] == "Bearer key-one" and seen[0]["rid"].startswith("r1#")
    assert seen[0]["sampling_params"]["top_k"] == -1 and not seen[0]["sampling_params"]["ignore_eos"]


def test_a_prompt_that_would_kill_a_server_is_not_sent():
    client = EngineClient("http://127.0.0.1:1", None, None, vocab_size=101)
    for ids in ([], [5, 101], [-1]):
        bad = GenerationRequest("b", np.array(ids, dtype=np.int64), 0, SamplingParams(1))
        with pytest.raises(EngineFault) as caught:
            asyncio.run(client.generate(bad, 1.0))
        assert caught.value.kind == "refused"
