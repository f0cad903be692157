"""Pushes to a real SGLang server on CPU, by every road. Runs if MEGARL_SGLANG_PYTHON names a Python that has SGLang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.generation.http.client import EngineClient
from megarl.weights.broadcast import BroadcastRoad
from megarl.weights.disk import DiskRoad
from megarl.weights.road import Road, Server
from megarl.weights.tensor import TensorRoad
from tests.unit.embedded_models import VOCAB_SIZE, make_engine, make_model
from tests.unit.one_rank import one_rank_world
from tests.unit.push_servers import pusher

PYTHON = os.environ.get("MEGARL_SGLANG_PYTHON")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="MEGARL_SGLANG_PYTHON is not set")]
_START_SECONDS = 300
# llama gives parameters back; qwen3 does not, and is judged by what it generates
FAMILIES = ("llama", "qwen3")
ROADS: dict[str, Callable[[Path], Road]] = {
    "tensor": lambda _: TensorRoad(60, 20_000),
    "broadcast": lambda _: BroadcastRoad(torch.device("cpu"), 60, 20_000),
    "disk": lambda path: DiskRoad(path, make_model("qwen3").config.to_dict(), 60, 20_000),
}


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    directory = tmp_path_factory.mktemp(request.param)
    make_model(request.param).save_pretrained(directory)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = (
        f"--model-path {directory} --device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--dtype float32 --max-total-tokens 4096 --skip-tokenizer-init --max-running-requests 16 "
        f"--mem-fraction-static 0.1 --disable-overlap-schedule --context-length 200 --host 127.0.0.1 --port {port}"
    )
    process = subprocess.Popen(
        [str(PYTHON), "-m", "sglang.launch_server", *options.split()],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        yield request.param, url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, "SGLang ended while it was starting"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"SGLang was not ready after {_START_SECONDS} s")


@pytest.mark.parametrize("road", ROADS)
def test_sglang_serves_what_was_pushed(road: str, server: tuple[str, str], tmp_path: Path) -> None:
    family, url = server
    asked = GenerationRequest("r", np.arange(3, 9), 5, SamplingParams(8, temperature=0.0))
    with one_rank_world() as world, pusher([url], ROADS[road](tmp_path), world, family) as trainer:
        client = EngineClient(url, None, None, vocab_size=VOCAB_SIZE)
        trainer.clients[url] = client  # type: ignore[assignment]
        if road == "tensor":  # a sender that died left its session open
            opened = Server(client)
            trainer.loop.run(opened.control("/begin_weight_update", {}, 20))
        # changed weights twice, then the same again
        for version, change in ((11, True), (12, True), (13, False)):
            if change:
                trainer.change()
            trainer.transport.push(version)
            assert trainer.verdicts.of == {url: (version, None)}
            got = trainer.loop.run(client.generate(asked, 60))
            expected = make_engine(trainer.model).generate([asked])[0]
            assert got.version == version
            assert got.token_ids.tolist() == expected.token_ids.tolist()
            # two programs that round differently in fp32
            np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-4)
