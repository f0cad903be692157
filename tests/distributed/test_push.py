"""Two ranks push to servers of their own: one export for both, verdicts at the driver, and nobody hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megarl.core.loop_thread import LoopThread
from tests.unit.embedded_models import make_model, parameters_of
from tests.unit.push_servers import Client, Verdicts, running_servers


class Deadly(Client):
    """Kills its server before the second bucket."""

    def __init__(self, url: str, pid: int) -> None:
        super().__init__(url)
        self._pid = pid
        self._num_buckets = 0

    async def control(self, route: str, body: Any, timeout: float) -> Any:
        self._num_buckets += route.startswith("/update_weights")
        if self._num_buckets == 2:
            os.kill(self._pid, signal.SIGKILL)
        return await super().control(route, body, timeout)


def push_job(world: Any, urls: list[str], doomed: dict[str, int]) -> dict[str, Any]:
    from megarl.weights.servers import ServerTransport
    from megarl.weights.tensor import TensorRoad

    model = make_model("qwen3")
    num_exported = 0

    def export() -> Iterator[list[tuple[str, torch.Tensor]]]:
        """As Megatron's: every bucket is a collective."""
        nonlocal num_exported
        tensors = parameters_of(model)
        for start in range(0, len(tensors), 5):
            world.barrier()
            num_exported += 1
            yield tensors[start : start + 5]

    clients = {url: Deadly(url, doomed[url]) if url in doomed else Client(url) for url in urls}
    verdicts = Verdicts(urls) if world.is_driver else None
    couriers = {url: rank % world.size for rank, url in enumerate(urls)}
    loop = LoopThread("push")
    transport = ServerTransport(export, couriers, clients.__getitem__, verdicts, TensorRoad(20, 20_000), world, loop)
    transport.push(5)
    return {"exported": num_exported, "verdicts": verdicts.of if verdicts else None}


@pytest.mark.parametrize("dies", [False, True], ids=["all live", "one dies"])
def test_two_couriers(dies: bool, gang: Any) -> None:
    with running_servers(3, make_model("qwen3")) as servers:
        urls = list(servers)
        doomed = {urls[1]: servers[urls[1]].process.pid} if dies else {}
        driver, other = gang(2).run(push_job, urls=urls, doomed=doomed)
    assert driver["exported"] == other["exported"] > 3
    problems = {url: problem for url, (version, problem) in driver["verdicts"].items() if version == 5}
    assert problems.keys() == set(urls)
    blamed = [url for url, problem in problems.items() if problem is not None]
    assert blamed == list(doomed)
