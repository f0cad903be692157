"""Real embedded servers for pushes: processes that listen, clients of them, and a fleet that takes down verdicts."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch
from transformers import PreTrainedModel

from megarl.core.checksum import combine, tensor_checksum
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import EngineKind
from megarl.core.world import World
from megarl.generation.embedded import serve
from megarl.generation.http.client import EngineClient
from megarl.weights.road import Road
from megarl.weights.servers import ServerTransport
from tests.unit.embedded_models import VOCAB_SIZE, make_model, parameters_of

SLOTS, LENGTH = 4, 96
_CONTEXT = multiprocessing.get_context("forkserver")
# beside what other tests want: all of one test process share one fork server
_CONTEXT.set_forkserver_preload([*forkserver._forkserver._preload_modules, "tests.unit.push_servers"])
KEY = "push-test-key"


class Client(EngineClient):
    """Of an embedded server."""

    def __init__(self, url: str) -> None:
        super().__init__(url, KEY, KEY, vocab_size=VOCAB_SIZE)

    async def kind(self) -> EngineKind:
        return EngineKind("embedded", (0, 1))


class Process:
    """A server process, forked from one that has imported torch already."""

    def __init__(self, config: Mapping[str, Any], patch: str = "") -> None:
        settings = {"model_config": dict(config), "num_slots": SLOTS, "max_sequence_length": LENGTH}
        line = json.dumps(settings | {"api_key": KEY, "admin_key": KEY})
        self._pipe, theirs = _CONTEXT.Pipe(duplex=False)
        self.process = _CONTEXT.Process(target=_serve, args=(line, patch, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def url(self) -> str:
        """Where it listens, once it does."""
        return f"http://127.0.0.1:{json.loads(self._pipe.recv())['port']}"

    def stop(self) -> None:
        """Let it hang."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


class _Said(io.StringIO):
    """What the server writes to its output, for the test."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def write(self, text: str) -> int:
        self._pipe.send(text)
        return len(text)


def _serve(line: str, patch: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    exec(patch, {})
    sys.stdin, sys.stdout = io.StringIO(line + "\n"), _Said(pipe)
    sys.exit(serve.main())


@contextmanager
def running_servers(count: int, model: PreTrainedModel, last_patch: str = "") -> Iterator[dict[str, Process]]:
    """``last_patch``: Python that the last of them runs first, to be worse than it should."""
    patches = [""] * (count - 1) + [last_patch]
    processes = [Process(model.config.to_dict(), patch) for patch in patches]
    try:
        yield {process.url(): process for process in processes}
    finally:
        for process in processes:
            process.end()


class Verdicts:
    """The fleet, as a push sees it: all servers are up, and what became of the push is written down."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        self.of: dict[str, tuple[int, str | None]] = {}

    def targets(self) -> list[str]:
        return self.urls

    def pushed(self, url: str, version: int, problem: str | None) -> None:
        self.of[url] = (version, problem)


class Pusher:
    """A trainer's end: a model whose weights are pushed, in export buckets of a few tensors."""

    def __init__(self, urls: list[str], road: Road, world: World, family: str = "qwen3") -> None:
        self.model = make_model(family)
        self.verdicts = Verdicts(urls)
        self.clients = {url: Client(url) for url in urls}
        self.loop = LoopThread("push-test")
        self.road = road
        self.is_busy = False
        self.transport = ServerTransport(
            self.export, {}, self.clients.__getitem__, self.verdicts, road, world, self.loop, lambda: self.is_busy
        )

    def export(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        tensors = parameters_of(self.model)
        for start in range(0, len(tensors), 5):
            yield tensors[start : start + 5]

    def change(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.01)

    @property
    def checksum(self) -> int:
        return combine(tensor_checksum(name, tensor) for name, tensor in parameters_of(self.model))

    def arrived(self, url: str) -> int:
        answer = self.loop.run(self.clients[url].control("/weights_checker", {"action": "checksum"}, 10))
        return int(answer["checksum"], 16)

    def close(self) -> None:
        for client in self.clients.values():
            self.loop.run(client.close())
        self.loop.close()


@contextmanager
def pusher(urls: list[str], road: Road, world: World, family: str = "qwen3") -> Iterator[Pusher]:
    made = Pusher(urls, road, world, family)
    try:
        yield made
    finally:
        made.close()
