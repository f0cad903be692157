"""A real run says where memory went, when something is wrong, and stops if it was asked to."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.runs import QUICKSTART, SHORT, ledger, train

pytestmark = pytest.mark.slow

SPIKE = """
import os
import torch
from megarl.algorithms.grpo import Grpo
from megarl.config.algorithms import GrpoSettings

class Spiky(Grpo):
    def __init__(self):
        super().__init__(GrpoSettings(name="grpo"))
        self.is_first = True

    def policy_loss(self, *given):
        if self.is_first and os.environ["RANK"] == "0":
            torch.ones(200, 2**18)
        self.is_first = False
        return super().policy_loss(*given)
"""
MIB = 1 / 1024
NO_EVALUATION = ("eval.every=0", "eval.before_training=false", "eval.at_end=false")


def test_a_spike_of_200_mib_is_found_in_its_phase_on_its_device_in_its_step(tmp_path: Path) -> None:
    (tmp_path / "spike.py").write_text(SPIKE)
    outcome = train(QUICKSTART, tmp_path, *SHORT, "algorithm=null", "algorithm={name: 'spike:Spiky'}", *NO_EVALUATION)
    assert outcome.code == 0, outcome.stderr
    peak = re.compile(r"memory/([^/]+/[^/]+)/end/onload/max_allocated/([0-9]+)")
    growth = {
        (record["step"], found[1], found[2]): (
            value - record["metrics"][f"memory/{found[1]}/start/offload/allocated/{found[2]}"]
        )
        / MIB
        for record in ledger(outcome)
        for name, value in record["metrics"].items()
        if (found := peak.fullmatch(name))
    }
    assert len(growth) > 30
    phase = ("actor_train/train_step", "0")
    # over the same phase of the next step; the kernel counts a process's pages in batches, and steps differ a little
    assert growth.pop((4, *phase)) - growth[5, *phase] == pytest.approx(200, abs=20)
    # everything that this model needs is far below
    assert max(growth.values()) < 100, max(growth, key=growth.__getitem__)


def test_a_fatal_alert_ends_the_run_after_it_is_recorded(tmp_path: Path) -> None:
    """Every sample scores 0, and the rule has no patience."""
    (tmp_path / "nothing.py").write_text("def score(prompt, sample):\n    return 0.0\n")
    settings = ("reward=null", "reward=nothing:score", "alerts.rules={H02: {patience: 1}}")
    told = train(QUICKSTART, tmp_path, *SHORT, *settings)
    assert told.code == 0, told.stderr
    (line,) = [line for line in told.stdout.splitlines() if line.startswith("ALERT H02")]
    assert line.startswith("ALERT H02 warn step 4: critic/score/")
    assert "reward" in line
    assert [record["metrics"].get("alerts/H02") for record in ledger(told)] == [None, None, None, None, 2, 2]
    assert ledger(told)[4]["alerts"][0]["rule"] == "H02"
    stopped = train(QUICKSTART, tmp_path, "--fresh", *SHORT, *settings, "alerts.fatal=[H02]")
    assert stopped.code == 65
    assert "MRL-3003 step 4 raised H02" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert ledger(stopped)[-1]["step"] == 4
