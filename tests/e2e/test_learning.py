"""The quickstart learns, with GRPO and with PPO, and a coin flip in the place of the reward teaches nothing.

Ten steps of reinforcement learning instead of the quickstart's full number: enough to see the rise.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, train

pytestmark = pytest.mark.slow


def accuracies(config: str, directory: Path, *overrides: str) -> tuple[float, float]:
    """Held-out greedy accuracy after the warm-up and after the last step."""
    outcome = train(ROOT / "configs" / f"{config}.yaml", directory, f"run.name={config}", *overrides)
    assert outcome.code == 0, outcome.stderr
    records = [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    found = {
        record["step"]: record["metrics"]["eval/held_out/score/mean@1"]
        for record in records
        if "eval/held_out/score/mean@1" in record["metrics"]
    }
    return found[200], found[max(found)]


@pytest.mark.parametrize(
    ("config", "overrides"),
    [("quickstart", ["run.num_steps=10"]), ("quickstart_ppo", ["run.num_steps=13", "actor.parallel.tp_size=2"])],
    ids=["grpo on dp2", "ppo on tp2"],
)
def test_accuracy_rises(config: str, overrides: list[str], tmp_path: Path) -> None:
    before, after = accuracies(config, tmp_path, *overrides)
    assert before < 0.55
    assert after > before + 0.25
    assert after > 0.75


def test_a_coin_teaches_nothing(tmp_path: Path) -> None:
    before, after = accuracies("quickstart_coin_flip", tmp_path, "run.num_steps=10", "actor.parallel.pp_size=2")
    assert after < before + 0.05
