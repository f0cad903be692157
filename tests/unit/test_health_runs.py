"""Rules over ledgers of real runs, and the page that describes the rules.

The ledgers in ``data`` were written by ``megarl train`` with ``configs/quickstart.yaml``, with
``configs/quickstart_ppo.yaml`` (from step 191), and with ``configs/quickstart.yaml actor.optimizer.lr=0.02
actor.optimizer.schedule=constant run.num_steps=30`` (from step 196). They hold the metrics about learning, to four
digits. Other times than update_actor's, and memory, were left out: other programs were running on the machine.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from megarl.config.alerts import AlertSettings
from megarl.metrics.health.alert import Severity
from megarl.metrics.health.health import Health
from megarl.trackers.ledger import read_ledger
from tests.unit.health_series import Raised, raised

ROOT = Path(__file__).parents[2]


def over_ledger(run: str) -> list[Raised]:
    records = read_ledger(Path(__file__).parent / "data" / f"{run}_metrics.jsonl")
    health = Health(AlertSettings())
    return [found for record in records for found in raised(health, [record.metrics], record.step)]


@pytest.mark.parametrize("run", ["quickstart", "quickstart_ppo"])
def test_a_run_that_learns_is_left_alone(run: str) -> None:
    """Its entropy is unusual, because its model has 0.4 million weights; that is information and no more."""
    found = over_ledger(run)
    assert {(alert.rule, alert.severity) for alert in found} == {("H03", Severity.INFO)}


def test_a_run_with_a_learning_rate_that_is_far_too_high_is_told_so() -> None:
    found = over_ledger("lr_high")
    said = {alert.rule: alert for alert in reversed(found)}
    assert set(said) == {"H02", "H03", "H05", "H15", "H19", "H20"}
    assert (said["H05"].step, said["H05"].severity) == (202, Severity.CRITICAL)
    assert "Lower actor.optimizer.lr" in said["H05"].message


def test_the_page_is_what_the_tool_writes() -> None:
    spec = importlib.util.spec_from_file_location("health_reference", ROOT / "tools" / "health_reference.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    written = (ROOT / "docs" / "health.md").read_text(encoding="utf-8")
    assert written == tool.reference(), "run: python tools/health_reference.py"
