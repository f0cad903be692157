"""An embedded engine in a server process of its own, and a small client."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

API_KEY, ADMIN_KEY = "the api key", "the admin key"
# Loads random weights that the test knows, since routes for pushes are not this file's subject.
_PRELOADED = """
import sys
from megarl.generation.embedded import serve
from tests.unit.embedded_models import load, make_model
make_engine = serve._make_engine
def make_loaded(settings):
    engine = make_engine(settings)
    load(engine, make_model(sys.argv[1]), version=1)
    return engine
serve._make_engine = make_loaded
sys.exit(serve.main())
"""


def settings_of(model: PreTrainedModel, **changes: Any) -> dict[str, Any]:
    return {
        "model_config": json.loads(model.config.to_json_string(use_diff=False)), "num_slots": 4,
        "max_sequence_length": 250, "api_key": API_KEY, "admin_key": ADMIN_KEY, **changes,
    }  # fmt: skip


def start(settings: dict[str, Any], family: str | None = None) -> subprocess.Popen[str]:
    """The process, with its settings sent. ``family``: it has the weights of `make_model(family)`."""
    program = ["-c", _PRELOADED, family] if family else ["-m", "megarl.generation.embedded.serve"]
    process = subprocess.Popen(
        [sys.executable, *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    return process


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(json.loads(process.stdout.readline())["port"])


@contextmanager
def running(settings: dict[str, Any], family: str | None = None) -> Iterator[Client]:
    process = start(settings, family)
    try:
        yield Client(port_of(process))
    finally:
        process.terminate()
        process.communicate()


class Client:
    """One connection per call."""

    def __init__(self, port: int) -> None:
        self.port = port

    def open(self, method: str, path: str, body: Any = None, key: str | None = None) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {} if key is None else {"Authorization": f"Bearer {key}"})
        return connection

    def call(self, method: str, path: str, body: Any = None, key: str | None = API_KEY) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer."""
        connection = self.open(method, path, body, key)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, text

    def control(self, path: str, body: Any = None) -> tuple[int, Any]:
        return self.call("POST", path, {} if body is None else body, ADMIN_KEY)

    def wait_for_load(self, num_running: int, num_waiting: int = 0) -> None:
        """Until so many requests run and wait."""
        while True:
            [load] = self.call("GET", "/v1/loads")[1]["loads"]
            if (load["num_running_reqs"], load["num_waiting_reqs"]) == (num_running, num_waiting):
                return
