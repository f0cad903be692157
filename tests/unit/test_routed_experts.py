"""Where the engine's router sent each token (R3): asked for, read, kept on the sample and in the record."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import Generation, GenerationRequest, SamplingParams
from megarl.core.sample import Group, Prompt
from megarl.core.world import World
from megarl.data.record import read_groups, write_groups
from megarl.data.tokenizer import load_tokenizer
from megarl.rollout.single_turn import sample_of
from megarl.run.servers import ServerEngines
from tests.unit.config_files import MINIMAL, load_text
from tests.unit.one_rank import one_rank_world

NUM_LAYERS, NUM_EXPERTS, TOP_K = 2, 6, 3
SPARSE = (
    "model.config.architectures=[Qwen3MoeForCausalLM]",
    f"model.config.num_experts={NUM_EXPERTS}",
    f"model.config.num_experts_per_tok={TOP_K}",
    "model.config.moe_intermediate_size=96",
)
PROMPT = np.array([5, 6, 7])
EXPERTS = np.random.default_rng(0).integers(0, NUM_EXPERTS, (len(PROMPT) + 1, NUM_LAYERS, TOP_K), dtype=np.int32)


class SparseServer(ThreadingHTTPServer):
    """Answers /generate with two tokens, and with their experts if it is asked for them, as SGLang does."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: SparseServer

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        meta = {
            "id": body["rid"], "finish_reason": {"type": "length"}, "prompt_tokens": 3, "completion_tokens": 2,
            "weight_version": "7", "output_token_logprobs": [[-0.5, 9, None], [-1.25, 8, None]],
        }  # fmt: skip
        if body.get("return_routed_experts"):
            meta["routed_experts"] = base64.b64encode(EXPERTS.tobytes()).decode()
        self._answer({"output_ids": [9, 8], "meta_info": meta})

    def _answer(self, tree: dict[str, Any]) -> None:
        data = json.dumps(tree).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as world:
        yield world


@pytest.fixture
def server() -> Iterator[SparseServer]:
    with SparseServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: SparseServer, world: World, directory: Path, *overrides: str) -> Generation:
    """What the client of a run with these settings makes of the server's answer."""
    settings = ("generation.engine=sglang", f"generation.urls=[{server.url}]", *overrides)
    engines = ServerEngines(load_text(directory, MINIMAL, *settings), world, directory, lambda _: None)
    loop = LoopThread("asks")
    try:
        request = GenerationRequest("r1", PROMPT, 3, SamplingParams(2))
        client = engines._clients[server.url]
        generation = loop.run(client.generate(request, 30.0))
        loop.run(client.close())
        return generation
    finally:
        loop.close()
        engines.close()


def test_experts_are_kept_to_the_record(server: SparseServer, world: World, tmp_path: Path) -> None:
    option = "generation.sglang.enable_return_routed_experts=true"
    generation = ask(server, world, tmp_path, *SPARSE, option)
    sample = sample_of(PROMPT, 3, generation, load_tokenizer("builtin:characters"))
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == len(sample.token_ids) - 1
    np.testing.assert_array_equal(sample.routed_experts, EXPERTS)
    write_groups(tmp_path / "record.jsonl", 1, [Group(Prompt("p", "", PROMPT), [sample])])
    [group] = read_groups(tmp_path / "record.jsonl")[1]
    kept = group.samples[0].routed_experts
    assert kept is not None and kept.dtype == np.int32
    np.testing.assert_array_equal(kept, EXPERTS)


@pytest.mark.parametrize("overrides", [SPARSE, ("generation.sglang.enable_return_routed_experts=true",)])
def test_they_are_asked_for_only_if_wanted_and_there(
    overrides: tuple[str, ...], server: SparseServer, world: World, tmp_path: Path
) -> None:
    assert ask(server, world, tmp_path, *overrides).routed_experts is None
    assert not any("return_routed_experts" in body for body in server.asked)
