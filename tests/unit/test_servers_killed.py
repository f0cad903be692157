"""Real server processes that are killed or stopped in the middle of a batch: no sample is lost, none is another one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from megarl.core.errors import EngineError
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.secret import Secret
from megarl.core.world import World
from megarl.generation.fleet.servers import ServerFleet
from megarl.generation.fleet.settings import FleetSettings
from megarl.generation.http import EngineClient
from megarl.generation.servers.processes import ServerSpec, StartedServers
from megarl.weights.servers import ServerTransport
from megarl.weights.tensor import TensorRoad
from tests.unit.embedded_models import VOCAB_SIZE, make_engine, make_model, make_requests, parameters_of
from tests.unit.one_rank import one_rank_world

MODEL = make_model("qwen3")
KEYS = (Secret("the-api-key"), Secret("the-admin-key"))
SLOTS, VERSION = 4, 7
PARAMS = SamplingParams(150)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed() -> list[Generation]:
    """What an engine in this process draws, with as many threads as the servers have: more round differently."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return make_engine(MODEL, max_sequence_length=200).generate(requests())
    finally:
        torch.set_num_threads(num_threads)


def requests() -> list[GenerationRequest]:
    return make_requests(24, PARAMS)


class Run:
    """Started servers with weights, a fleet of them, and the road between."""

    def __init__(self, started: StartedServers, world: World, settings: FleetSettings) -> None:
        self.started = started
        self.said: list[str] = []
        self.loop = LoopThread("killed-servers")
        self._clients = {url: EngineClient(url, *KEYS, vocab_size=VOCAB_SIZE) for url in started.urls}
        self.fleet = ServerFleet(list(self._clients.values()), settings, self.loop, started, self.said.append)
        self._transport = ServerTransport(
            lambda: [parameters_of(MODEL)],
            {},
            self._clients.__getitem__,
            self.fleet,
            TensorRoad(timeout_seconds=20.0),
            world,
            self.loop,
        )

    def push(self) -> None:
        self._transport.push(VERSION)

    def collect(self, disturb: Sequence[tuple[str, signal.Signals]] = ()) -> list[Generation | None]:
        """Serve all requests, as a trainer does: what is not served because nobody has weights is asked for again."""
        everything = requests()
        found: dict[str, Generation] = {}
        while len(found) < len(everything):
            rest = [request for request in everything if request.id not in found]
            batch = self.fleet.submit(rest, [int(one.id[1:]) // 4 for one in rest], range(VERSION, VERSION + 1))
            if disturb:
                self._wait_until_busy()
            for url, number in disturb:
                os.kill(self.pid(url), number)
            disturb = ()
            served = batch.wait()
            found |= {one.id: one for one in served.generations if one is not None}
            if served.needs_push:
                self.push()
        return [found[request.id] for request in everything]

    def pid(self, url: str) -> int:
        return self.started._processes[url].pid

    def close(self) -> None:
        self.fleet.close()
        for client in self._clients.values():
            self.loop.run(client.close())
        self.loop.close()
        self.started.stop()

    def _wait_until_busy(self) -> None:
        """All servers have requests, and draw."""
        servers = self.fleet._core.roster.servers
        wait_for(lambda: all(server.load == SLOTS for server in servers))
        used = {url: _cpu_seconds(self.pid(url)) for url in self.started.urls}
        wait_for(lambda: all(_cpu_seconds(self.pid(url)) > seconds + 0.02 for url, seconds in used.items()))


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def _cpu_seconds(pid: int) -> float:
    return psutil.Process(pid).cpu_times().user


@contextmanager
def running(num_servers: int, logs: Path, world: World, max_restarts: int = 2) -> Iterator[Run]:
    config = MODEL.config.to_dict()
    spec = ServerSpec("embedded", {"model_config": config, "num_slots": SLOTS, "max_sequence_length": 200})
    settings = FleetSettings(
        num_slots=SLOTS,
        request_timeout_seconds=60.0,
        step_timeout_seconds=120.0,
        min_servers=1,
        max_restarts=max_restarts,
        probe_seconds=0.5,
    )
    started = StartedServers([spec] * num_servers, logs, *KEYS, start_timeout_seconds=120.0)
    started.start()
    run = Run(started, world, settings)
    try:
        run.push()
        yield run
    finally:
        run.close()


def assert_same(samples: Sequence[Generation | None], expected: Sequence[Generation]) -> None:
    for sample, right in zip(samples, expected, strict=True):
        assert sample is not None
        assert torch.equal(torch.from_numpy(sample.token_ids), torch.from_numpy(right.token_ids))
        assert sample.logprobs.tobytes() == right.logprobs.tobytes()
        assert (sample.id, sample.finish, sample.version) == (right.id, right.finish, VERSION)


@pytest.mark.slow
def test_a_killed_and_a_stopped_server_lose_no_sample(
    tmp_path: Path, world: World, undisturbed: list[Generation]
) -> None:
    with running(2, tmp_path, world) as run:
        assert_same(run.collect(), undisturbed)
        first, second = run.started.urls
        assert_same(run.collect([(first, signal.SIGKILL)]), undisturbed)
        assert any(first in line and "-> dead" in line for line in run.said), run.said
        wait_for(run.fleet.needs_push)  # it is started again, at the same address
        run.push()
        stopped = run.pid(second)
        assert_same(run.collect([(second, signal.SIGSTOP)]), undisturbed)
        assert f"{second}: healthy" not in run.fleet.describe()
        # it does not answer, so it is killed and started anew
        wait_for(run.fleet.needs_push)
        assert not psutil.pid_exists(stopped)
        run.push()
        assert_same(run.collect([(url, signal.SIGKILL) for url in run.started.urls]), undisturbed)


def test_a_server_that_dies_again_and_again_is_given_up_and_the_run_ends(tmp_path: Path, world: World) -> None:
    with running(1, tmp_path, world, max_restarts=1) as run:
        [url] = run.started.urls
        run.collect([(url, signal.SIGKILL)])
        with pytest.raises(EngineError, match="MRL-5160") as caught:
            run.collect([(url, signal.SIGKILL)])
        assert f"{url}: retired" in str(caught.value)
        assert any("is not used any more" in line for line in run.said)
        assert not run.started.is_running(url)
