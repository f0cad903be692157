"""Servers on two nodes: one that is killed on the node without the driver is started again there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.namespaces import two_nodes
from tests.e2e.runs import QUICKSTART, train
from tests.e2e.test_servers import samples_and_weights, totals
from tests.e2e.test_torchrun import (
    PATIENCE,
    SETTINGS,
    assert_nothing_is_left,
    on_two_nodes,
    outcome_in,
    ranks_in,
    started,
    wait_for_step,
)

pytestmark = pytest.mark.slow

# long enough that the server comes back before the end
LONGER = ("run.num_steps=40", "launch.hang_timeout_seconds=600")
SERVERS = ("generation.num_servers=2",)


def test_a_server_of_another_node_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    expected = train(QUICKSTART, tmp_path / "inside", *SETTINGS, *LONGER)
    assert expected.code == 0, expected.stderr
    with two_nodes() as nodes:
        commands = [[*command, *LONGER, *SERVERS] for command in on_two_nodes(nodes, tmp_path)]
        with started(commands, tmp_path) as processes:
            wait_for_step(2, tmp_path, processes)
            (server,) = [
                child
                for child in ranks_in(tmp_path)[1].children()
                if "megarl.generation.embedded.serve" in child.cmdline()
            ]
            server.kill()
            outputs = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "-> dead: " in outputs[0]
    assert "; it is started again (1 of 3)." in outputs[0]
    assert "; it serves again." in outputs[0]
    outcome = outcome_in(tmp_path, 0, outputs[0])
    assert totals(outcome)["engine/num_restarts"] == 1
    assert samples_and_weights(outcome) == samples_and_weights(expected)
    assert_nothing_is_left(tmp_path)
