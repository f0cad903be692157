"""The fleet as the driver sees it: calls from the main thread, work in another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megarl.core.errors import EngineError
from megarl.core.loop_thread import LoopThread
from megarl.generation.fleet.servers import ServerFleet
from megarl.generation.fleet.settings import FleetSettings
from megarl.metrics.meter import Meter
from megarl.metrics.values import Sum
from tests.unit.fleet_world import ScriptedProcesses, ScriptedServer, fault, requests_of

SETTINGS = FleetSettings(
    num_slots=2,
    request_timeout_seconds=60.0,
    step_timeout_seconds=60.0,
    min_servers=1,
    max_restarts=0,
    probe_seconds=0.05,
)


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread("fleet-test")
    yield thread
    thread.close()


def open_fleet(loop: LoopThread, said: list[str]) -> tuple[ServerFleet, list[ScriptedServer]]:
    servers = [ScriptedServer(f"http://server-{i}", seconds=0.01, weights=3) for i in range(2)]
    fleet = ServerFleet(servers, SETTINGS, loop, ScriptedProcesses(servers), said.append)
    assert fleet.needs_push()
    for url in fleet.targets():
        fleet.pushed(url, 3, None)
    assert not fleet.needs_push()
    return fleet, servers


def test_a_batch_of_the_driver(loop: LoopThread) -> None:
    fleet, servers = open_fleet(loop, [])
    servers[0].script = [fault("garbled")]
    requests, groups = requests_of(4, 2)
    batches = [fleet.submit(requests, groups, range(3, 4)) for _ in range(2)]
    for batch in batches:
        served = batch.wait()
        assert [generation and generation.id for generation in served.generations] == [r.id for r in requests]
        assert not served.needs_push
    meter = Meter()
    fleet.report(meter)
    counted = {name: meter.statistics[f"engine/num_{name}"] for name in ("retries", "rejected", "lost", "aborted")}
    assert counted == {"retries": Sum(1.0), "rejected": Sum(1.0), "lost": Sum(0.0), "aborted": Sum(0.0)}
    fleet.release(["weights", "kv_cache"])
    assert fleet.needs_push()
    fleet.resume(["weights", "kv_cache"])
    fleet.close()


def test_the_floor_reaches_the_driver_with_the_history(loop: LoopThread) -> None:
    said: list[str] = []
    fleet, servers = open_fleet(loop, said)
    for server in servers:
        server.is_running = False
    batch = fleet.submit(*requests_of(1, 1), range(3, 4))
    with pytest.raises(EngineError, match="MRL-5160") as caught:
        batch.wait()
    assert all(f"{server.url}: retired" in str(caught.value) for server in servers)
    assert all(f"{server.url}: healthy -> retired" in line for server, line in zip(servers, sorted(said), strict=True))
    assert "restarts 0 of 0" in fleet.describe()
    fleet.close()
