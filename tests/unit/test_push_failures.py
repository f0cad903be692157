"""What goes wrong with one server is told about that server, and happens to no other."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.errors import StorageError
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.core.world import World
from megarl.weights.broadcast import BroadcastRoad
from megarl.weights.disk import DiskRoad
from megarl.weights.road import Road
from megarl.weights.tensor import TensorRoad
from tests.unit.embedded_models import make_model
from tests.unit.one_rank import one_rank_world
from tests.unit.push_servers import Client, Process, Pusher, pusher, running_servers

_BUCKET = 20_000
ROADS: dict[str, Callable[[Path], Road]] = {
    "tensor": lambda _: TensorRoad(5, _BUCKET),
    "broadcast": lambda _: BroadcastRoad(torch.device("cpu"), 5, _BUCKET),
    "disk": lambda path: DiskRoad(path, make_model("qwen3").config.to_dict(), 5, _BUCKET),
}
# Says yes to everything and keeps what it has, after the first update; or keeps one parameter a little different.
LIES = """
from megarl.generation.embedded.weights import DecoderWeights
write = DecoderWeights.write
def lie(self, name, tensor):
    if {condition}:
        write(self, name, {instead})
DecoderWeights.write = lie
"""
KEEPS_OLD = LIES.format(
    condition="name not in self.__dict__", instead="(self.__dict__.update({name: True}), tensor)[1]"
)
NUDGES = LIES.format(condition="True", instead="tensor * 1.01 if name == 'model.norm.weight' else tensor")


class Doomed(Client):
    """Does something to its server's process right before the n-th bucket."""

    def __init__(self, url: str, at_bucket: int, action: Callable[[], None]) -> None:
        super().__init__(url)
        self._left = at_bucket
        self._action = action

    async def control(self, route: str, body: Mapping[str, Any], timeout: float) -> Any:
        if route.startswith("/update_weights"):
            self._left -= 1
            if self._left == 0:
                self._action()
        return await super().control(route, body, timeout)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as made:
        yield made


@pytest.fixture
def servers() -> Iterator[dict[str, Process]]:
    with running_servers(2, make_model("qwen3")) as processes:
        yield processes


def check_only_one_is_blamed(trainer: Pusher, version: int, healthy: str, bad: str) -> str:
    assert trainer.verdicts.of[healthy] == (version, None)
    assert trainer.arrived(healthy) == trainer.checksum
    problem = trainer.verdicts.of[bad][1]
    assert problem
    return problem


@pytest.mark.parametrize("road", ROADS)
def test_a_server_that_dies_half_way_spoils_nothing(
    road: str, servers: dict[str, Process], world: World, tmp_path: Path
) -> None:
    shared = set(os.listdir("/dev/shm"))
    first, second = servers
    with pusher([first, second], ROADS[road](tmp_path), world) as trainer:
        trainer.clients[second] = Doomed(second, 1 if road == "disk" else 3, servers[second].process.kill)
        trainer.change()
        trainer.transport.push(2)
        assert "unreachable" in check_only_one_is_blamed(trainer, 2, first, second)
        # and the next push, to whoever is left
        trainer.verdicts.urls = [first]
        trainer.change()
        trainer.transport.push(3)
        assert trainer.verdicts.of[first] == (3, None)
    assert {name for name in os.listdir("/dev/shm") if "torch" in name or "megarl" in name} <= shared


def test_a_server_that_hangs_is_given_up(servers: dict[str, Process], world: World) -> None:
    first, second = servers
    with pusher([first, second], TensorRoad(2, _BUCKET), world) as trainer:
        trainer.clients[second] = Doomed(second, 2, servers[second].stop)
        trainer.transport.push(2)
        assert "timeout" in check_only_one_is_blamed(trainer, 2, first, second)


@pytest.mark.parametrize("lie", [KEEPS_OLD, NUDGES], ids=["keeps old weights", "one parameter is 1 % off"])
def test_a_server_that_lies_is_found_out(lie: str, world: World) -> None:
    with running_servers(2, make_model("qwen3"), lie) as processes:
        honest, liar = processes
        with pusher([honest, liar], TensorRoad(5), world) as trainer:
            trainer.transport.push(1)
            trainer.change()
            trainer.transport.push(2)
            assert "checksum" in check_only_one_is_blamed(trainer, 2, honest, liar)


def test_a_push_without_any_server_still_exports_everything(world: World) -> None:
    with pusher(["http://127.0.0.1:9"], TensorRoad(5), world) as trainer:
        trainer.transport.push(1)
        assert "unreachable" in str(trainer.verdicts.of["http://127.0.0.1:9"][1])


def test_a_disk_that_takes_no_more_is_named(servers: dict[str, Process], world: World, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pusher(list(servers), ROADS["disk"](tmp_path), world) as trainer:
        trainer.transport.push(1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            with pytest.raises(StorageError, match="MRL-7007"):
                trainer.transport.push(2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [path.name for path in tmp_path.iterdir()] == ["version_1"]
        # they were not even paused: the old weights are served
        asked = GenerationRequest("r", np.arange(3, 9), 5, SamplingParams(4, temperature=0.0))
        for client in trainer.clients.values():
            assert trainer.loop.run(client.generate(asked, 20)).version == 1
        trainer.transport.push(3)
        assert [path.name for path in tmp_path.iterdir()] == ["version_3"]
        assert {problem for _, problem in trainer.verdicts.of.values()} == {None}
