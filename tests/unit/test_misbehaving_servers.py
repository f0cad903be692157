"""Servers that answer wrongly, late or not at all: nothing of it is ever taken for a sample, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import get_args

import numpy as np
import pytest
import torch

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.core.world import World
from megarl.generation.fleet.servers import ServerFleet
from megarl.generation.fleet.settings import FleetSettings
from megarl.generation.http import EngineClient
from megarl.weights.servers import ServerTransport
from megarl.weights.tensor import TensorRoad
from tests.misbehaving_server import (
    HARMFUL,
    HARMLESS,
    UNASKED,
    VOCAB_SIZE,
    MisbehavingServer,
    PushVice,
    Settings,
    is_same,
    misbehaving,
    right_answer,
)
from tests.unit.one_rank import one_rank_world

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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as made:
        yield made


class Trainer:
    """Weights, a fleet of misbehaving servers, and the road between them."""

    def __init__(self, servers: dict[str, MisbehavingServer], loop: LoopThread, world: World, **changes: float) -> None:
        self.servers = servers
        self.weights = torch.zeros(8)
        self.said: list[str] = []
        self.loop = loop
        self._clients = {url: EngineClient(url, None, None, vocab_size=VOCAB_SIZE) for url in servers}
        settings = FleetSettings(
            **{
                "num_slots": 4, "request_timeout_seconds": 1.0, "step_timeout_seconds": 60.0, "min_servers": 1,
                "max_restarts": 3, "probe_seconds": 0.1, **changes,
            }  # type: ignore[arg-type]
        )  # fmt: skip
        self.fleet = ServerFleet(list(self._clients.values()), settings, loop, None, self.said.append)
        self._transport = ServerTransport(
            self._export, {}, self._clients.__getitem__, self.fleet, TensorRoad(timeout_seconds=1.0), world, loop
        )

    def push(self, version: int) -> None:
        self.weights.fill_(version)
        self._transport.push(version)

    def check_batch(self, requests: Sequence[GenerationRequest], version: int) -> Counter[str]:
        """All are served, all rightly; by whom."""
        groups = [number // 4 for number in range(len(requests))]
        served = self.fleet.submit(requests, groups, range(version, version + 1)).wait()
        for request, sample in zip(requests, served.generations, strict=True):
            assert sample is not None
            assert is_same(sample, right_answer(request, version)), (request.id, sample.engine)
        return Counter(sample.engine for sample in served.generations if sample is not None)

    def close(self) -> None:
        self.fleet.close()
        for client in self._clients.values():
            self.loop.run(client.close())

    def _export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        yield [("first", self.weights)]
        yield [("second", self.weights.neg())]


@contextmanager
def training(settings: Sequence[Settings], loop: LoopThread, world: World, **changes: float) -> Iterator[Trainer]:
    with ExitStack() as stack:
        servers = [stack.enter_context(misbehaving(each, loop)) for each in settings]
        trainer = Trainer({url: server for server, url in servers}, loop, world, **changes)
        stack.callback(trainer.close)
        yield trainer


def test_a_fleet_with_one_good_server_serves_everything(loop: LoopThread, world: World) -> None:
    """Whatever the others do: all samples come, all of them right."""
    vices = [*(vice for vice in HARMFUL if vice != "hang"), *UNASKED]
    often = {vice: 0.7 / len(vices) for vice in vices}
    others = [
        Settings(chance=often, seed=1),
        Settings(chance={vice: 0.2 / len(vices) for vice in vices}, seed=2),
        Settings(schedule=["hang"]),
        Settings(schedule=["", "", "hang", "slow"]),
        Settings(schedule=["error"]),
        Settings(flaps_every=2, chance=often, seed=3),
    ]
    source = np.random.default_rng(1)
    with training([*others, Settings()], loop, world) as trainer:
        *_, good = trainer.servers
        for version in (1, 2, 3):
            trainer.push(version)
            requests = [make_request("r", number, source) for number in range(200)]
            assert trainer.check_batch(requests, version)[good] > 0
        assert sum(sum(server.injected.values()) for server in trainer.servers.values()) > 100


def test_no_lie_about_weights_gets_into_a_batch(loop: LoopThread, world: World) -> None:
    vices = [vice for vice in get_args(PushVice) if vice not in ("", "lie_both")]
    source = np.random.default_rng(2)
    with training([*(Settings(push=vice) for vice in vices), Settings()], loop, world) as trainer:
        *_, good = trainer.servers
        for version in (1, 2):
            trainer.push(version)
        requests = [make_request("r", number, source) for number in range(40)]
        assert trainer.check_batch(requests, 2) == {good: 40}
        told = trainer.fleet.describe()
        assert all(word in told for word in ("out of memory", "checksum", "it reports version"))


def test_a_server_that_flaps_is_given_up(loop: LoopThread, world: World) -> None:
    """It comes back by itself, and fails again, until nobody counts on it any more."""
    bad = Settings(schedule=["error"])
    source = np.random.default_rng(3)
    with training([bad, Settings()], loop, world, max_restarts=1, probe_seconds=0.02) as trainer:
        [flapping, good] = trainer.servers
        version = 0
        while "retired" not in trainer.fleet.describe():
            version += 1
            trainer.push(version)
            requests = [make_request("r", number, source) for number in range(16)]
            assert trainer.check_batch(requests, version) == {good: 16}
        assert f"{flapping}: retired" in trainer.fleet.describe()
        assert any("-> retired" in line for line in trainer.said)


def test_too_few_servers_end_the_run(loop: LoopThread, world: World) -> None:
    servers = [Settings(), Settings()]
    source = np.random.default_rng(4)
    with training(servers, loop, world, max_restarts=0, min_servers=2, probe_seconds=0.02) as trainer:
        trainer.push(1)
        trainer.check_batch([make_request("r", number, source) for number in range(8)], 1)
        for server in trainer.servers.values():
            server.settings.schedule = ["error"]
        with pytest.raises(EngineError, match=r"MRL-516[01]"):
            trainer.check_batch([make_request("r", number, source) for number in range(8)], 1)
