"""Every road brings every bit to real servers, which then serve the new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch

from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.core.world import World
from megarl.weights.broadcast import BroadcastRoad
from megarl.weights.disk import DiskRoad
from megarl.weights.road import Road, Server
from megarl.weights.tensor import TensorRoad
from tests.unit.embedded_models import make_engine, make_model
from tests.unit.one_rank import one_rank_world, reported
from tests.unit.push_servers import KEY, Process, pusher, running_servers

ROADS: dict[str, Callable[[Path], Road]] = {
    "tensor": lambda _: TensorRoad(20, bucket_bytes=20_000),
    "broadcast": lambda _: BroadcastRoad(torch.device("cpu"), 20, bucket_bytes=20_000),
    "disk": lambda path: DiskRoad(path, make_model("qwen3").config.to_dict(), 20, bucket_bytes=20_000),
}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Process]]:
    with running_servers(2, make_model("qwen3")) as processes:
        yield processes


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as made:
        yield made


def request(num_tokens: int = 12, name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, np.arange(3, 9), 5, SamplingParams(num_tokens, temperature=0.0))


async def num_running(url: str) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(f"{url}/v1/loads") as answer:
        return int((await answer.json())["loads"][0]["num_running_reqs"])


@pytest.mark.parametrize("road", ROADS)
def test_every_bit_arrives_and_is_served(road: str, servers: dict[str, Process], world: World, tmp_path: Path) -> None:
    with pusher(list(servers), ROADS[road](tmp_path), world) as trainer:
        for version in (7, 8):
            trainer.change()
            numbers = reported(trainer.transport.push(version), world)
            assert trainer.verdicts.of == dict.fromkeys(servers, (version, None))
            assert [trainer.arrived(url) for url in servers] == [trainer.checksum] * 2
            expected = make_engine(trainer.model).generate([request()])[0]
            for client in trainer.clients.values():
                got = trainer.loop.run(client.generate(request(), 20))
                assert got.version == version
                assert got.token_ids.tolist() == expected.token_ids.tolist()
            assert numbers["weights/version"] == version
            assert numbers["weights/push_bytes"] == sum(p.nbytes for p in trainer.model.parameters())


def test_a_request_under_way_survives_and_knows_which_weights_drew_what(
    servers: dict[str, Process], world: World
) -> None:
    url = next(iter(servers))
    with pusher([url], TensorRoad(20), world) as trainer:
        trainer.transport.push(1)
        trainer.is_busy = True
        client = trainer.clients[url]
        long = trainer.loop.submit(client.generate(request(85, "long"), 60))
        while not trainer.loop.run(num_running(url)):
            pass
        trainer.change()
        trainer.transport.push(2)
        got = long.result()
        assert trainer.verdicts.of[url] == (2, None)
        assert len(got.token_ids) == 85
        if got.spans:  # else the push came after its end, which a slow machine may do
            assert [span.version for span in got.spans] == [1, 2]
            assert (got.spans[0].start, got.spans[-1].stop) == (0, 85)


def test_a_sender_that_died_half_way_does_not_lock_the_engine(servers: dict[str, Process], world: World) -> None:
    url = next(iter(servers))
    with pusher([url], TensorRoad(20, bucket_bytes=20_000), world) as trainer:
        trainer.transport.push(3)
        half = TensorRoad(20)
        server = Server(trainer.clients[url])
        trainer.loop.run(server.learn_kind())
        trainer.loop.run(server.control("/begin_weight_update", {}, 20))
        parcel = half.load([(name, tensor * 2) for name, tensor in next(trainer.export())], [server])
        trainer.loop.run(half.carry(parcel, [server], None))
        assert server.problem is None
        trainer.change()
        trainer.transport.push(4)
        assert trainer.verdicts.of[url] == (4, None)
        assert trainer.arrived(url) == trainer.checksum
