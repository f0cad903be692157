"""``megarl doctor`` on real ranks, with the faults that it is for: every rank ends, and what is known is told."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.namespaces import Node, two_nodes
from tests.e2e.runs import QUICKSTART, ROOT, environment

# What a busy machine needs for two imports of torch.
PATIENCE = 240.0
# How long ranks wait for each other: on a busy machine imports of torch end at different times.
JOIN_SECONDS = 20


@dataclass(frozen=True)
class Told:
    """What one rank said, and how it ended."""

    code: int
    stdout: str
    stderr: str

    def findings(self) -> dict[str, dict[str, Any]]:
        """Errors before others where a name has several."""
        rows = json.loads(self.stdout)["findings"]
        return {row["name"]: row for row in sorted(rows, key=lambda row: row["level"] == "error")}


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as found:
        yield found


def variables(rank: int, num_nodes: int, address: str, port: int) -> dict[str, str]:
    """Those of torchrun, for two ranks."""
    local = 0 if num_nodes == 2 else rank
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(2 // num_nodes),
        "GROUP_RANK": str(rank - local), "GROUP_WORLD_SIZE": str(num_nodes),
        "MASTER_ADDR": address, "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def doctor(*settings: str) -> list[str]:
    return [sys.executable, "-m", "megarl", "doctor", str(QUICKSTART), "--json", *settings]


def ask_both(
    nodes: tuple[Node, Node],
    commands: tuple[list[str], list[str]],
    extra: tuple[dict[str, str], dict[str, str]] = ({}, {}),
) -> tuple[Told, Told]:
    """One rank on each node."""
    processes = [
        subprocess.Popen(
            node.command(*command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment(**variables(rank, 2, nodes[0].address, 29500), **extra[rank]),
        )
        for rank, (node, command) in enumerate(zip(nodes, commands, strict=True))
    ]
    try:
        said = [process.communicate(timeout=PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    first, second = (Told(process.returncode, *both) for process, both in zip(processes, said, strict=True))
    for told in (first, second):
        assert "Traceback" not in told.stderr
        assert "socket.cpp" not in told.stderr
    return first, second


def ask_alone(rank: int, num_nodes: int, tmp_path: Path) -> Told:
    """One of two ranks, without the other."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    asked = subprocess.run(
        doctor("launch.join_timeout_seconds=1", f"run.dir={tmp_path}"),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(**variables(rank, num_nodes, "127.0.0.1", port)),
        timeout=PATIENCE,
    )
    assert "Traceback" not in asked.stderr
    return Told(asked.returncode, asked.stdout, asked.stderr)


def test_a_missing_rank_costs_no_findings(tmp_path: Path) -> None:
    told = ask_alone(0, 1, tmp_path)
    assert told.code == 69
    assert told.stderr.startswith("MRL-5305 not ready to train: network.")
    found = told.findings()
    assert found["network"]["text"] == "of 2 ranks 1 did not come within 1 s: rank 1"
    assert found["versions"]["level"] == "ok"


def test_nobody_at_the_address_of_rank_0(tmp_path: Path) -> None:
    """The only rank of the second node tells what it knows."""
    told = ask_alone(1, 2, tmp_path)
    assert told.code == 69
    found = told.findings()
    assert found["network"]["text"].startswith("MRL-5303 rank 1 on")
    assert found["versions"]["level"] == "ok"


def test_a_wrong_interface_and_other_settings_on_one_node(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    own = (f"run.dir={tmp_path}", f"launch.join_timeout_seconds={JOIN_SECONDS}")
    first, second = ask_both(
        nodes, (doctor(*own), doctor(*own, "run.num_steps=7")), ({}, {"GLOO_SOCKET_IFNAME": "nope"})
    )
    assert (first.code, second.code, second.stdout) == (69, 0, "")
    found = first.findings()
    assert found["interface"]["text"].startswith("GLOO_SOCKET_IFNAME=nope, but the interfaces here are ")
    assert [host[-6:] for host in found["interface"]["hosts"]] == ["node 1"]
    assert found["network"]["text"] == "not tried, because of the interface of rank 1"
    assert found["settings"]["level"] == "error"
    assert found["settings"]["text"].endswith(" on rank 0, 7 on rank 1")
    assert found["software"]["level"] == "ok"


def test_loopback_between_nodes(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    command = doctor(f"run.dir={tmp_path}", f"launch.join_timeout_seconds={JOIN_SECONDS}")
    loopback = {"GLOO_SOCKET_IFNAME": "lo"}
    first, second = ask_both(nodes, (command, command), (loopback, loopback))
    assert (first.code, second.code) == (69, 0)
    assert "loopback does not leave this one" in first.findings()["interface"]["text"]


def test_an_interface_that_leads_nowhere(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """It exists, and has an address that the other node does not reach: only connecting shows it."""
    for number, node in enumerate(nodes):
        enter = ["ip", "-n", node.namespace]
        made = [*enter, "link", "add", "island", "type", "veth", "peer", "name", "shore"]
        subprocess.run(made, check=True)
        subprocess.run([*enter, "addr", "add", f"10.99.{number}.1/24", "dev", "island"], check=True)
        for name in ("island", "shore"):
            subprocess.run([*enter, "link", "set", name, "up"], check=True)
    command = doctor(f"run.dir={tmp_path}", f"launch.join_timeout_seconds={JOIN_SECONDS}")
    island = {"GLOO_SOCKET_IFNAME": "island"}
    first, second = ask_both(nodes, (command, command), (island, island))
    assert (first.code, second.code) == (69, 0), second.stderr
    network = first.findings()["network"]
    assert network["text"].startswith("the ranks met, but not all reach each other: rank 0 ")
    assert "does not reach rank 1, 10.99.1.1: Network is unreachable" in network["text"]
    assert "does not reach rank 0, 10.99.0.1: Network is unreachable" in network["text"]
    assert network["remedy"].startswith("unset GLOO_SOCKET_IFNAME")


def test_a_run_directory_that_one_node_cannot_write(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    command = doctor(f"run.dir={tmp_path}", f"launch.join_timeout_seconds={JOIN_SECONDS}")
    read_only = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    on_second = ["unshare", "--mount", "sh", "-c", read_only, str(tmp_path), *command]
    first, second = ask_both(nodes, (command, on_second))
    assert (first.code, second.code) == (69, 0), second.stderr
    found = first.findings()
    assert found["run directory"]["text"].endswith("cannot be written: Read-only file system")
    assert "cannot be written: Read-only file system" in found["shared disk"]["text"]
    assert "node 1" in found["shared disk"]["text"]
    assert found["network"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []
