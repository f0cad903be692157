"""What a run asks of a Ray cluster, without a cluster: placement, trust, restarts, and a rank in an actor's hands."""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli import main
from megarl.config.load import load_config
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.launch.hosted import HostedRank
from megarl.launch.ray_plan import (
    ClusterNode,
    Placement,
    asks_for_token,
    is_worth_a_restart,
    lack,
    plan_placement,
    require_closed,
    visible_devices,
)

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
GPU_NODE = ClusterNode("10.0.0.1", 32, 4)


@cache
def config(*overrides: str) -> RunConfig:
    return load_config(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("num_ranks", "device", "nodes", "asked", "expected"),
    [
        (8, "auto", [GPU_NODE] * 2, None, Placement(2, 4, "GPU")),
        (4, "auto", [GPU_NODE] * 2, None, Placement(1, 4, "GPU")),
        (4, "auto", [GPU_NODE] * 2, 2, Placement(2, 2, "GPU")),
        (8, "cpu", [GPU_NODE] * 2, None, Placement(1, 8, "CPU")),
        (2, "auto", [ClusterNode("a", 1, 0)] * 2, None, Placement(2, 1, "CPU")),
        # nodes that are not there yet are expected to be as large as the largest
        (16, "auto", [GPU_NODE] * 2, None, Placement(4, 4, "GPU")),
        (4, "cuda", [ClusterNode("a", 8, 0)], None, Placement(4, 1, "GPU")),
        (2, "auto", [], None, Placement(2, 1, "CPU")),
        # GPUs of their own for servers: two servers of two GPUs on two nodes, one on each
        (4, "auto", [GPU_NODE] * 2, None, Placement(2, 2, "GPU", 2)),
        # a GPU without a core holds no rank
        (2, "auto", [ClusterNode("a", 1, 8), ClusterNode("b", 1, 8)], None, Placement(2, 1, "GPU")),
    ],
)
def test_placements(
    num_ranks: int, device: str, nodes: list[ClusterNode], asked: int | None, expected: Placement
) -> None:
    servers = [
        "generation.engine=sglang",
        "generation.colocated=false",
        "generation.num_servers=2",
        "generation.tp_size=2",
    ]
    extra = servers if expected.num_spare else []
    run = config(f"run.num_ranks={num_ranks}", f"run.device={device}", *extra)
    assert plan_placement(run, nodes, asked) == expected


@settings(deadline=None)
@given(
    st.integers(0, 4),
    st.lists(st.builds(ClusterNode, st.just("a"), st.integers(0, 9), st.integers(0, 9)), max_size=5),
)
def test_every_placement_holds_all_ranks_and_the_fewest_nodes_that_can(
    log_ranks: int, nodes: list[ClusterNode]
) -> None:
    num_ranks = 2**log_ranks
    found = plan_placement(config(f"run.num_ranks={num_ranks}"), nodes, None)
    assert found.num_nodes * found.per_node == num_ranks

    def fits(num_nodes: int) -> bool:
        per_node = num_ranks // num_nodes
        on_gpus = found.device == "GPU"
        enough = [node.num_cpus >= per_node and (not on_gpus or node.num_gpus >= per_node) for node in nodes]
        return sum(enough) >= num_nodes

    possible = [count for count in range(1, num_ranks + 1) if num_ranks % count == 0 and fits(count)]
    if possible:
        assert found.num_nodes == min(possible)


def test_nodes_that_do_not_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"MRL-1674 --nodes 3 .*\nAsk for one of 1, 2, 4\."):
        plan_placement(config("run.num_ranks=4"), [GPU_NODE], 3)


def test_ranks_of_a_node_see_the_devices_of_all_of_them() -> None:
    assert visible_devices(["3", "1"]) == "3,1"
    # the first rank of a node holds those of the servers, which come last
    assert visible_devices(["3,5,6", "1"]) == "3,1,5,6"
    assert visible_devices(["", ""]) is None
    assert Placement(2, 2, "GPU", 2).bundle == {"CPU": 2.0, "GPU": 4.0}
    assert [Placement(2, 2, "GPU", 2).num_gpus_of(rank) for rank in range(4)] == [3, 1, 3, 1]


def test_what_a_cluster_lacks() -> None:
    text = str(lack(Placement(2, 4, "GPU"), [GPU_NODE], 1.0, 300))
    assert "needs 2 nodes with 4 GPUs each" in text
    assert "The cluster has GPUs on 1 nodes: 10.0.0.1 with 4; 1 are free." in text


@pytest.mark.parametrize(
    ("codes", "is_worth"),
    [
        ([70, -9], True),  # killed, and its neighbour's broken socket
        ([69, None], True),  # a node was lost
        ([69, 69], True),
        ([75, 75], True),  # somebody else asked a rank to leave
        ([76, 76], True),
        ([143, 0], True),
        ([70, 70], False),
        ([1, 0], False),
        *[([code, -9], False) for code in (64, 65, 66, 73, 74)],
    ],
)
def test_what_is_worth_another_start(codes: list[int | None], is_worth: bool) -> None:
    assert is_worth_a_restart(codes) is is_worth


def test_an_open_cluster_is_refused_unless_allowed_or_out_of_reach() -> None:
    with pytest.raises(ConfigError, match=r"MRL-1672 .* at 10\.0\.0\.1: .*"):
        require_closed(["127.0.0.1", "10.0.0.1"], asks_for_token=False, is_allowed=False)
    require_closed(["10.0.0.1"], asks_for_token=True, is_allowed=False)
    require_closed(["10.0.0.1"], asks_for_token=False, is_allowed=True)
    require_closed(["127.0.0.1", "::1"], asks_for_token=False, is_allowed=False)


@contextmanager
def dashboard(status: int) -> Iterator[str]:
    """A server on loopback that gives one answer to everybody."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("status", "is_closed"), [(200, False), (401, True), (403, True), (500, False)])
def test_the_cluster_itself_is_asked_whether_it_is_open(status: int, is_closed: bool) -> None:
    with dashboard(status) as address:
        # what this process believes does not count
        assert asks_for_token(address, "token" if status == 200 else None) is is_closed


def test_without_a_dashboard_the_mode_of_this_process_counts() -> None:
    assert asks_for_token(None, "token")
    assert not asks_for_token("", None)
    assert not asks_for_token("127.0.0.1:1", None)


def test_mistakes_before_a_cluster_is_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["launch", "ray", str(QUICKSTART)]) == 64
    assert "MRL-1673 run.dir=runs is relative" in capsys.readouterr().err
    assert main(["launch", "ray", str(QUICKSTART), "--nodes", "0", f"run.dir={tmp_path}"]) == 64
    assert "--nodes must be 1 or more" in capsys.readouterr().err
    assert main(["launch", "ray", str(QUICKSTART), "--doctor", "--fresh", f"run.dir={tmp_path}"]) == 64
    assert "--doctor does not train" in capsys.readouterr().err


def hear_all(host: HostedRank) -> tuple[bytes, int]:
    output = b""
    while True:
        data, code = host.poll(5.0)
        output += data
        if code is not None:
            return output, code


def test_a_hosted_rank_speaks_ends_and_has_no_key_to_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    host = HostedRank()
    assert 0 < host.place().port < 65536
    host.start(["check", str(QUICKSTART), "rub=1"], {"RANK_OF_TEST": "1"}, None)
    output, code = hear_all(host)
    assert code == 64
    assert b"rub is not a setting" in output
    assert host.poll(0.0) == (b"", 64)


def test_signals_reach_a_hosted_rank(tmp_path: Path) -> None:
    """With a program of the test in place of megarl, which shows its environment and waits."""
    (tmp_path / "megarl").mkdir()
    (tmp_path / "megarl" / "__main__.py").write_text(
        "import os, signal\n"
        "seen = sorted(name for name in os.environ if name.startswith('RAY_'))\n"
        "os.write(1, f'{seen} {os.environ[\"RANK\"]}\\n'.encode())\n"
        "signal.pause()\n"
    )
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    try:
        host = HostedRank()
        host.start([], {"RANK": "3", "PYTHONPATH": str(tmp_path)}, str(tmp_path))
    finally:
        del os.environ["RAY_ADDRESS"]
    assert host.poll(30.0) == (b"[] 3\n", None)
    child = next(one for one in psutil.Process().children() if "megarl" in one.cmdline())
    assert child.cmdline()[0] == sys.executable
    host.signal(signal.SIGTERM)
    assert hear_all(host) == (b"", -signal.SIGTERM)
