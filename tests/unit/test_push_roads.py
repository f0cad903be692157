"""Every road brings every bit to real servers, which then serve the new weights."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.core.world import World
from megarl.weights.broadcast import BroadcastRoad
from megarl.weights.disk import DiskRoad
from megarl.weights.road import Road
from megarl.weights.tensor import TensorRoad
from tests.unit.embedded_models import make_engine, make_model
from tests.unit.one_rank import one_rank_world, reported
from tests.unit.push_servers import Process, pusher, running_servers

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


@pytest.mark.parametrize("road", ROADS)
def test_every_bit_arrives_and_is_served(road: str, servers: dict[str, Process], world: World, tmp_path: Path) -> None:
    with pusher(list(servers), ROADS[road](tmp_path), world) as trainer:
        for version in (7, 8):
            trainer.change()
            numbers = reported(trainer.transport.push(version), world)
            assert trainer.verdicts.of == {url: (version, None) for url in servers}
            assert [trainer.arrived(url) for url in servers] == [trainer.checksum] * 2
            expected = make_engine(trainer.model).generate([request()])[0]
            for client in trainer.clients.values():
                got = trainer.loop.run(client.generate(request(), 20))
                assert got.version == version
                assert got.token_ids.tolist() == expected.token_ids.tolist()
            assert numbers["weights/version"] == version
            assert numbers["weights/push_bytes"] == sum(p.nbytes for p in trainer.model.parameters())
