"""Server processes of a run: started together, restarted in place, and none outlives its owner or tells a key."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.secret import Secret
from megarl.generation.http import EngineClient
from megarl.generation.servers.processes import ServerSpec, StartedServers
from tests.unit.embedded_models import VOCAB_SIZE, make_model

API_KEY, ADMIN_KEY = "the-api-key-3f9c", "the-admin-key-77ab"
CONFIG = make_model("llama").config.to_dict()
SETTINGS = {"model_config": CONFIG, "num_slots": 2, "max_sequence_length": 32}


def make_servers(logs: Path, *specs: ServerSpec, seconds: float = 120.0) -> StartedServers:
    return StartedServers(specs, logs, Secret(API_KEY), Secret(ADMIN_KEY), seconds)


def make_program(directory: Path, script: str) -> Path:
    program = directory / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def group_of(pid: int) -> list[psutil.Process]:
    """The process and all that it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedServers]:
    servers = make_servers(tmp_path_factory.mktemp("logs"), *[ServerSpec("embedded", SETTINGS)] * 2)
    servers.start()
    yield servers
    servers.stop()


def ask_kind(url: str, api_key: str | None, admin_key: str | None) -> str:
    async def ask() -> str:
        client = EngineClient(url, api_key, admin_key, vocab_size=VOCAB_SIZE)
        try:
            await client.control("/abort_request", {"abort_all": True}, 10.0)
            return (await client.kind()).name
        finally:
            await client.close()

    return asyncio.run(ask())


def test_all_are_ready_and_have_the_keys(started: StartedServers) -> None:
    assert len(set(started.urls)) == 2
    for url in started.urls:
        assert started.is_running(url)
        assert ask_kind(url, API_KEY, ADMIN_KEY) == "embedded"
        for keys in ((None, None), (API_KEY, API_KEY), ("wrong", "wrong")):
            with pytest.raises(EngineFault, match="refused: HTTP 401"):
                ask_kind(url, *keys)


def test_no_key_is_to_be_seen_from_outside(started: StartedServers) -> None:
    for url in started.urls:
        for process in group_of(started._processes[url].pid):
            for place in ("cmdline", "environ"):
                told = Path(f"/proc/{process.pid}/{place}").read_bytes()
                assert API_KEY.encode() not in told and ADMIN_KEY.encode() not in told
        log = started._servers[url][2].read_text()
        assert json.loads(log.splitlines()[0]) == {"port": int(url.rpartition(":")[2])}
        assert API_KEY not in log and ADMIN_KEY not in log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_is_started_again_at_its_address(started: StartedServers, number: signal.Signals) -> None:
    first, second = started.urls
    before, other = started._processes[first].pid, started._processes[second].pid
    os.kill(before, number)
    if number == signal.SIGKILL:
        while started.is_running(first):
            time.sleep(0.005)
    asyncio.run(started.restart(first))
    assert started.is_running(first) and started.is_running(second)
    assert not psutil.pid_exists(before) and started._processes[second].pid == other
    assert ask_kind(first, API_KEY, ADMIN_KEY) == "embedded"


def test_stop_leaves_nothing(tmp_path: Path) -> None:
    servers = make_servers(tmp_path, ServerSpec("embedded", SETTINGS))
    servers.start()
    [url] = servers.urls
    processes = group_of(servers._processes[url].pid)
    servers.stop()
    assert not servers.is_running(url)
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    servers.stop()  # twice is once


def test_a_server_that_does_not_start_says_why_and_takes_the_others_along(tmp_path: Path) -> None:
    bad = ServerSpec("embedded", {**SETTINGS, "dtype": "float8"})
    patient = ServerSpec("embedded", SETTINGS, python=str(make_program(tmp_path, "exec sleep 1000")))
    servers = make_servers(tmp_path, patient, bad)
    with pytest.raises(
        EngineError, match=r"MRL-5140 .* ended while it started(.|\n)*engine_1.log(.|\n)*float8"
    ) as told:
        servers.start()
    assert API_KEY not in str(told.value) and ADMIN_KEY not in str(told.value)
    assert not any(servers.is_running(url) for url in servers.urls)


def test_a_program_that_prints_the_keys_does_not_get_them_into_the_message(tmp_path: Path) -> None:
    program = make_program(tmp_path, "cat; exit 1")
    servers = make_servers(tmp_path / "logs", ServerSpec("embedded", SETTINGS, python=str(program)))
    with pytest.raises(EngineError, match="MRL-5140") as told:
        servers.start()
    assert API_KEY not in str(told.value) and '"num_slots": 2' in str(told.value)
    with pytest.raises(EngineFault, match="MRL-5140") as fault:
        asyncio.run(servers.restart(servers.urls[0]))
    assert fault.value.kind == "unreachable" and API_KEY not in str(fault.value)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    servers = make_servers(tmp_path, ServerSpec("sglang", {}, python="/no/such/python"))
    with pytest.raises(EngineError, match=r"MRL-5140(.|\n)*/no/such/python cannot be run: No such file"):
        servers.start()


def test_a_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = make_program(tmp_path, "echo still loading; exec sleep 1000")
    servers = make_servers(tmp_path / "logs", ServerSpec("embedded", SETTINGS, python=str(program)), seconds=0.5)
    with pytest.raises(EngineError, match=r"MRL-5141 .*start_timeout_seconds(.|\n)*still loading"):
        servers.start()
    assert not any(servers.is_running(url) for url in servers.urls)


_OWNER = """
import json, sys
from pathlib import Path
from megarl.core.secret import Secret
from megarl.generation.servers.processes import ServerSpec, StartedServers
spec = ServerSpec("embedded", json.loads(sys.argv[2]))
servers = StartedServers([spec, spec], Path(sys.argv[1]), Secret("a"), Secret("b"), 120.0)
servers.start()
print(json.dumps([servers._processes[url].pid for url in servers.urls]), flush=True)
sys.stdin.read()
"""


def test_all_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path), json.dumps(SETTINGS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    servers = [process for pid in json.loads(owner.stdout.readline()) for process in group_of(pid)]
    owner.kill()
    owner.communicate()
    assert psutil.wait_procs(servers, timeout=30)[1] == []
