"""Engines under test, all behind the same protocol, and what each of them cannot do."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megarl.core.protocols import Engine
from megarl.core.secret import Secret
from megarl.generation.embedded import EmbeddedEngine
from megarl.generation.http import EngineClient, HttpEngine, Road
from megarl.generation.servers.model_directory import write_model_directory
from megarl.generation.servers.processes import ServerSpec, StartedServers
from megarl.generation.servers.router import start_router
from megarl.generation.servers.sglang_args import SglangModel, sglang_args, sglang_environment
from tests.unit.embedded_models import VOCAB_SIZE, make_model, parameters_of, shape_of

SGLANG_PYTHON = os.environ.get("MEGARL_SGLANG_PYTHON", "")
API_KEY, ADMIN_KEY = "conformance-api-key", "conformance-admin-key"
SLOTS, LENGTH = 4, 250
START_SECONDS = 300.0


@dataclass
class Subject:
    """One engine, and the model whose weights it serves."""

    engine: Engine
    model: PreTrainedModel
    # where it listens; None if it is inside this process
    url: str | None = None
    # what it cannot do, and why
    lacks: Mapping[str, str] = field(default_factory=dict)
    version: int = 0

    def need(self, what: str) -> None:
        """Skip the test if the engine cannot do this."""
        if what in self.lacks:
            pytest.skip(self.lacks[what])

    def push(self, factor: float = 1.0) -> int:
        """Multiply the weights, and serve them under the next version."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)
        self.version += 1
        self.engine.begin_weight_update()
        tensors = parameters_of(self.model)
        half = len(tensors) // 2
        self.engine.update_weights(tensors[:half])
        self.engine.update_weights(tensors[half:])
        self.engine.end_weight_update(self.version)
        return self.version


_NO_MODEL = "it draws numbers, not tokens of a model"


@contextmanager
def embedded(directory: Path) -> Iterator[Subject]:
    model = make_model("llama")
    yield Subject(EmbeddedEngine(shape_of(model), SLOTS, LENGTH), model)


@contextmanager
def embedded_server(directory: Path) -> Iterator[Subject]:
    model = make_model("llama")
    settings = {"model_config": model.config.to_dict(), "num_slots": SLOTS, "max_sequence_length": LENGTH}
    with _started(ServerSpec("embedded", settings), directory) as url:
        yield from _over_http(url, None, model, directory, {})


@contextmanager
def misbehaving_server(directory: Path) -> Iterator[Subject]:
    """One that behaves well, so that what the other tests hold against it is what an engine does."""
    settings = {"seconds_per_token": 0.002, "api_key": API_KEY, "admin_key": ADMIN_KEY}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.misbehaving_server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps(settings) + "\n")
        process.stdin.flush()
        url = f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        lacks = {"model": _NO_MODEL, "completeness": "it does not know which parameters there are"}
        yield from _over_http(url, None, make_model("llama"), directory, lacks)
    finally:
        process.kill()
        process.communicate()


_SGLANG_LACKS = {
    "seeds": "SGLang draws by seeds in its deterministic mode only, which needs a GPU",
    "completeness": "SGLang does not tell whether a parameter never arrived",
    "checksum": "SGLang has no checksum that can be compared with the trainer's",
    "release": "SGLang gives memory back on a GPU only",
}


@contextmanager
def sglang(directory: Path, is_routed: bool = False) -> Iterator[Subject]:
    model = make_model("llama")
    write_model_directory(directory / "model", model.config.to_dict())
    settings = sglang_args(SglangModel(directory / "model", "float32", LENGTH, SLOTS), {})
    spec = ServerSpec("sglang", settings, python=SGLANG_PYTHON, environment=sglang_environment("cpu"))
    with ExitStack() as stack:
        url = stack.enter_context(_started(spec, directory))
        road = None
        if is_routed:
            log = directory / "router.log"
            router = start_router("start", [url], Secret(API_KEY), log, SGLANG_PYTHON, START_SECONDS)
            stack.callback(router.stop)
            road = router.road
        yield from _over_http(url, road, model, directory, _SGLANG_LACKS)


@contextmanager
def routed_sglang(directory: Path) -> Iterator[Subject]:
    with sglang(directory, is_routed=True) as subject:
        yield subject


SUBJECTS = {
    "embedded": embedded,
    "embedded server": embedded_server,
    "misbehaving server": misbehaving_server,
    "sglang": sglang,
    "sglang behind a router": routed_sglang,
}


@contextmanager
def _started(spec: ServerSpec, directory: Path) -> Iterator[str]:
    servers = StartedServers([spec], directory / "logs", Secret(API_KEY), Secret(ADMIN_KEY), START_SECONDS)
    servers.start()
    try:
        yield servers.urls[0]
    finally:
        servers.stop()


def _over_http(
    url: str, road: Road | None, model: PreTrainedModel, directory: Path, lacks: Mapping[str, str]
) -> Iterator[Subject]:
    client = EngineClient(url, API_KEY, ADMIN_KEY, vocab_size=VOCAB_SIZE, road=road)
    (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
    engine = HttpEngine(client, directory, timeout_seconds=120.0)
    try:
        assert asyncio.run(_is_healthy(url))
        yield Subject(engine, model, url, lacks)
    finally:
        engine.close()


async def _is_healthy(url: str) -> bool:
    probe = EngineClient(url, None, None, vocab_size=VOCAB_SIZE)
    try:
        return await probe.is_healthy(30.0)
    finally:
        await probe.close()
