"""Ranks that meet and cannot go on together end together, soon, with one message."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.launch.agreement import terms
from megarl.models.rendezvous import Meeting, Rendezvous
from megarl.run.progress import config_digest
from tests.e2e.namespaces import two_nodes
from tests.e2e.runs import QUICKSTART, environment

pytestmark = pytest.mark.slow

# What a busy machine needs for a start with an import of torch.
PATIENCE = 120.0
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts rank RANK of 2 as torchrun would, without torchrun."""
    started: list[subprocess.Popen[str]] = []

    def start_rank(rank: int, port: int, *words: str, enter: tuple[str, ...] = (), **variables: str) -> object:
        numbers = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": port}
        given = {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"} | variables
        command = [*enter, sys.executable, "-m", "megarl", "train", str(QUICKSTART), f"run.dir={tmp_path}", *words]
        process = subprocess.Popen(
            command,
            env=environment(**given),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start_rank  # type: ignore[misc]
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def meet(port: int, directory: Path, *words: str) -> Meeting:
    """This process comes as rank 1, wants the same as rank 0, and waits for it; it never connects."""
    own = terms(load_config(QUICKSTART, [f"run.dir={directory}", *words]))
    patience = timedelta(seconds=PATIENCE)
    place = f"tcp://127.0.0.1:{port}"
    meeting = Meeting(Rendezvous(1, 2, 1, place, join_timeout=patience), config_digest(own))
    meeting.call_the_roll()
    return meeting


def test_ranks_with_other_settings_do_not_train_together(start: Start) -> None:
    port = free_port()
    ranks = [start(0, port), start(1, port, "actor.optimizer.lr=1e-5", "rollout.temperature=0.5")]
    outputs = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [64, 64], outputs
    host = socket.gethostname()
    assert outputs[0].startswith(f"MRL-1607 rank 1 on {host} would not train the same run as rank 0 on {host}:\n"), (
        outputs
    )
    assert "    actor.optimizer.lr: rank 0 has 0.0008, rank 1 has 1e-05\n" in outputs[0]
    assert "    rollout.temperature: rank 0 has 1.0, rank 1 has 0.5\n" in outputs[0]
    assert outputs[1] == ""


def test_ranks_that_cannot_connect_end_together(start: Start) -> None:
    """gloo is told to use the one interface on which nodes never reach each other."""
    seconds = 10
    with two_nodes() as nodes:
        ranks = []
        for rank, node in enumerate(nodes):
            place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": "2"}
            network = {"MASTER_ADDR": nodes[0].address, "GLOO_SOCKET_IFNAME": "lo"}
            settings = f"launch.join_timeout_seconds={seconds}"
            ranks.append(start(rank, 29556, settings, enter=tuple(node.command()), **place, **network))
        begin = time.monotonic()
        outputs = [rank.communicate(timeout=PATIENCE)[0] for rank in ranks]
    # the promise is the time to join and ten seconds, from when torch is loaded, which a busy machine does in a minute
    assert time.monotonic() - begin < seconds + 10 + 60
    assert [rank.returncode for rank in ranks] == [69, 69], outputs
    assert "".join(outputs).count("MRL-") == 1
    assert "MRL-5306 rank" in outputs[0]
    host = socket.gethostname()
    assert f"use lo of {host}, lo of {host}" in outputs[0] and "Unset GLOO_SOCKET_IFNAME" in outputs[0]


def test_a_rank_whose_neighbour_never_connects_is_ended_by_its_guard(start: Start, tmp_path: Path) -> None:
    port, words = free_port(), ("launch.join_timeout_seconds=2",)
    rank = start(0, port, *words)
    meeting = meet(port, tmp_path, *words)
    output, _ = rank.communicate(timeout=PATIENCE)
    assert meeting.size == 2
    assert rank.returncode == 69, output
    assert output.startswith(f"MRL-5306 rank 0 on {socket.gethostname()} could not connect to the others within"), (
        output
    )


@pytest.mark.parametrize("is_connecting", [False, True])
def test_one_request_ends_a_rank_that_waits_for_others(is_connecting: bool, start: Start, tmp_path: Path) -> None:
    port = free_port()
    rank = start(0, port)
    if is_connecting:
        meet(port, tmp_path)
    else:
        wait_for_listener(port)
    rank.send_signal(signal.SIGTERM)
    output, _ = rank.communicate(timeout=PATIENCE)
    assert rank.returncode == 76, output
    assert output.startswith("MRL-8002 stopped by SIGTERM at the start.\n"), output


def wait_for_listener(port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
