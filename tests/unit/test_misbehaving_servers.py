"""Servers that answer wrongly, late or not at all: nothing of it is ever taken for a sample, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from megarl.core.engine_fault import EngineFault
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.http import EngineClient
from tests.misbehaving_server import HARMFUL, HARMLESS, VOCAB_SIZE, Settings, is_same, misbehaving, right_answer

NUM_INJECTIONS = 10_000
AT_ONCE = 32
# hanging answers cost this much each, so they are few
HANG_SECONDS, PATIENCE_SECONDS = 0.1, 60.0
NUM_HANGS = 50


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("misbehaving")
    yield thread
    thread.close()


def make_request(name: str, number: int, source: np.random.Generator) -> GenerationRequest:
    params = SamplingParams(int(source.integers(1, 9)), stop_token_ids=(3, 30) if source.random() < 0.5 else ())
    prompt = source.integers(0, VOCAB_SIZE, int(source.integers(1, 6)))
    return GenerationRequest(f"{name}/{number}", prompt, int(source.integers(2**63)), params)


def test_ten_thousand_bad_answers_give_no_sample(loop: LoopThread) -> None:
    source = np.random.default_rng(5)
    kinds = [kind for kind in HARMFUL if kind != "hang"]
    names = ["hang"] * NUM_HANGS + [kinds[i % len(kinds)] for i in range(NUM_INJECTIONS - NUM_HANGS)]
    names += ["good"] * 500 + list(HARMLESS) * 50
    requests = [make_request(names[i], i, source) for i in source.permutation(len(names))]
    faults: Counter[str] = Counter()
    admitted: Counter[str] = Counter()

    async def ask(client: EngineClient, queue: list[GenerationRequest]) -> None:
        while queue:
            request = queue.pop()
            kind = request.id.partition("/")[0]
            try:
                sample = await client.generate(request, HANG_SECONDS if kind == "hang" else PATIENCE_SECONDS)
            except EngineFault:
                faults[kind] += 1
            else:
                admitted[kind] += 1
                assert is_same(sample, right_answer(request, version=4)), request.id

    async def ask_all(url: str) -> None:
        client = EngineClient(url, None, None, vocab_size=VOCAB_SIZE)
        queue = list(requests)
        await asyncio.gather(*(ask(client, queue) for _ in range(AT_ONCE)))
        await client.close()

    with misbehaving(Settings(version=4, slow_seconds=0.01), loop) as (server, url):
        asyncio.run(ask_all(url))
        assert sum(server.injected[kind] for kind in HARMFUL) == NUM_INJECTIONS
    assert sum(faults.values()) == NUM_INJECTIONS
    assert admitted == {"good": 500, **dict.fromkeys(HARMLESS, 50)}
    assert set(faults) == set(HARMFUL)
