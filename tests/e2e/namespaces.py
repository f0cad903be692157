"""Two machines for a test: two network namespaces with a cable between them. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Node:
    """A namespace and its address on the network that both share."""

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *words]


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Both are gone afterwards, with everything that was in them."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed; `make setup-launchers` does it")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    pid = os.getpid()
    nodes = (Node(f"megarl-{pid}-a", f"a{pid}", "10.77.0.1"), Node(f"megarl-{pid}-b", f"b{pid}", "10.77.0.2"))
    try:
        for node in nodes:
            made = _ip("netns", "add", node.namespace)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        cable = [nodes[0].interface, "netns", nodes[0].namespace, "type", "veth", "peer", "name", nodes[1].interface]
        laid = _ip("link", "add", *cable, "netns", nodes[1].namespace)
        if laid.returncode:
            pytest.skip(f"no virtual cables here: {laid.stderr.strip()}")
        for node in nodes:
            _ip("-n", node.namespace, "addr", "add", f"{node.address}/24", "dev", node.interface, check=True)
            for interface in ("lo", node.interface):
                _ip("-n", node.namespace, "link", "set", interface, "up", check=True)
        yield nodes
    finally:
        for node in nodes:
            _ip("netns", "del", node.namespace)


def _ip(*words: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)
