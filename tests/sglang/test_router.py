"""A real sglang-router between the client and small servers: it passes on, and decides nothing."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import GenerationRequest, SamplingParams
from megarl.core.secret import Secret
from megarl.generation.http.client import EngineClient
from megarl.generation.servers.router import Router, start_router

PYTHON = os.environ.get("MEGARL_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="MEGARL_SGLANG_PYTHON names no interpreter with sglang-router")

KEY = Secret("the workers' key")


class Worker(ThreadingHTTPServer):
    """Answers like SGLang, or with an error if it is ``broken``; knows the keys that it was shown."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Answers)
        self.broken = False
        self.shown: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answers(BaseHTTPRequestHandler):
    server: Worker

    def do_GET(self) -> None:
        self._answer(200, {"model_path": "somewhere", "tp_size": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.shown.append(self.headers["Authorization"])
        meta = {
            "id": body["rid"], "finish_reason": {"type": "length"}, "prompt_tokens": 2, "completion_tokens": 1,
            "weight_version": "3", "output_token_logprobs": [[-0.5, 9, None]],
        }  # fmt: skip
        self._answer(500 if self.server.broken else 200, {"output_ids": [9], "meta_info": meta})

    def _answer(self, status: int, tree: dict[str, Any]) -> None:
        data = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None: ...


@contextmanager
def worker(port: int = 0) -> Iterator[Worker]:
    with Worker(port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def routed(address: str, workers: list[str], log: Path, key: Secret = KEY, seconds: float = 60.0) -> Iterator[Router]:
    router = start_router(address, workers, key, log, PYTHON, seconds)
    try:
        yield router
    finally:
        router.stop()


def ask(router: Router, url: str, times: int) -> list[str]:
    """One request after the other; what became of each."""
    loop, client = LoopThread("asks"), EngineClient(url, KEY, KEY, vocab_size=16, road=router.road)
    request = GenerationRequest("r", np.array([1, 2]), 3, SamplingParams(1))
    outcomes = []
    for _ in range(times):
        try:
            outcomes.append(loop.run(client.generate(request, 30.0)).finish)
        except EngineFault as fault:
            outcomes.append(fault.kind)
    loop.run(client.close())
    loop.close()
    return outcomes


def test_it_passes_on_what_it_gets_under_the_workers_key(tmp_path: Path) -> None:
    with worker() as one, worker() as two, routed("start", [one.url, two.url], tmp_path / "router.log") as router:
        assert ask(router, one.url, 6) == ["length"] * 6
        assert one.shown == [f"Bearer {KEY.reveal()}"] * 6
        assert two.shown == []
        assert router.road.key is not None
        for secret in (KEY, router.road.key):
            assert secret.reveal() not in (tmp_path / "router.log").read_text()
        other = EngineClient(one.url, KEY, KEY, vocab_size=16, road=type(router.road)(router.road.url, Secret("wrong")))
        loop = LoopThread("asks")
        with pytest.raises(EngineFault, match="401"):
            loop.run(other.generate(GenerationRequest("r", np.array([1, 2]), 3, SamplingParams(1)), 30.0))
        loop.run(other.close())
        loop.close()
    assert router._process is not None and router._process.returncode is not None


def test_it_neither_tries_again_nor_gives_a_worker_up(tmp_path: Path) -> None:
    """Twenty failures are told twenty times; a worker that works again, at its old address, is asked at once."""
    with ExitStack() as stack:
        first = stack.enter_context(worker())
        router = stack.enter_context(routed("start", [first.url], tmp_path / "router.log"))
        first.broken = True
        assert ask(router, first.url, 20) == ["refused"] * 20
        assert len(first.shown) == 20
        first.broken = False
        assert ask(router, first.url, 2) == ["length"] * 2
        first.shutdown()
        first.server_close()
        assert set(ask(router, first.url, 3)) <= {"refused", "unreachable"}
        again = stack.enter_context(worker(first.server_address[1]))
        assert ask(router, again.url, 3) == ["length"] * 3


def test_every_request_gets_to_the_server_that_it_is_for(tmp_path: Path) -> None:
    """Also while one of them is down: the others' requests are theirs."""
    with ExitStack() as stack:
        workers = [stack.enter_context(worker()) for _ in range(5)]
        urls = [one.url for one in workers]
        router = stack.enter_context(routed("start", urls, tmp_path / "router.log"))
        for down in (None, workers[1]):
            if down is not None:
                down.shutdown()
                down.server_close()
            for number, one in enumerate(workers):
                if one is not down:
                    before = [len(other.shown) for other in workers]
                    assert ask(router, one.url, 3) == ["length"] * 3
                    before[number] += 3
                    assert [len(other.shown) for other in workers] == before


def test_one_that_is_there_is_told_and_then_forgets(tmp_path: Path) -> None:
    with worker() as one, worker() as two, routed("start", [one.url], tmp_path / "router.log") as theirs:
        key = theirs.road.key
        assert key is not None
        with routed(theirs.road.url + "/", [one.url, two.url], tmp_path / "none.log", key=key) as router:
            assert router._added.keys() == {two.url}
        assert known(theirs, two.url) is False and known(theirs, one.url) is True
        with pytest.raises(EngineError, match=r"MRL-5142 .*HTTP 401"):
            start_router(theirs.road.url, [one.url], Secret("wrong"), tmp_path / "none.log", None, 5.0)
    with pytest.raises(EngineError, match="MRL-5142"):
        start_router(theirs.road.url, [], KEY, tmp_path / "none.log", None, 5.0)


def known(router: Router, url: str) -> bool:
    """Whether it lists the worker; it may take a moment to forget one."""
    for _ in range(100):
        if url not in asyncio.run(router.workers()):
            return False
        threading.Event().wait(0.02)
    return True


def test_a_worker_that_is_not_there_is_named(tmp_path: Path) -> None:
    with worker() as gone:
        url = gone.url
    with pytest.raises(EngineError, match=rf"MRL-5143 .*{url}"):
        start_router("start", [url], KEY, tmp_path / "router.log", PYTHON, 3.0)


def test_an_interpreter_without_a_router_is_told(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)MRL-5140 .*No module named 'sglang_router'"):
        start_router("start", [], KEY, tmp_path / "router.log", None, 30.0)
