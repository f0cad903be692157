"""The quickstart learns, with GRPO and with PPO, and a coin flip in the place of the reward teaches nothing.

Ten steps of reinforcement learning instead of the quickstart's full number: enough to see the rise.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, train

pytestmark = pytest.mark.slow


def accuracies(config: str, directory: Path, *overrides: str) -> tuple[float, float]:
    """Held-out greedy accuracy after the warm-up and after the last step."""
    outcome = train(ROOT / "configs" / f"{config}.yaml", directory, "run.name=quickstart", *overrides)
    assert outcome.code == 0, outcome.stderr
    records = [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]
    found = {
        record["step"]: record["metrics"]["eval/held_out/score/mean@1"]
        for record in records
        if "eval/held_out/score/mean@1" in record["metrics"]
    }
    return found[200], found[max(found)]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float, float]:
    """The quickstart on two replicas: its directory and accuracies. Its checkpoints are of steps 200 and 210."""
    directory = tmp_path_factory.mktemp("grpo")
    return directory, *accuracies("quickstart", directory, "run.num_steps=10")


def assert_rise(before: float, after: float) -> None:
    assert before < 0.55
    assert after > before + 0.25
    assert after > 0.75


def test_accuracy_rises_with_grpo(grpo: tuple[Path, float, float]) -> None:
    _, before, after = grpo
    assert_rise(before, after)


def test_accuracy_rises_with_ppo_on_tp2(tmp_path: Path) -> None:
    assert_rise(*accuracies("quickstart_ppo", tmp_path, "run.num_steps=13", "actor.parallel.tp_size=2"))


def test_a_coin_teaches_nothing(grpo: tuple[Path, float, float], tmp_path: Path) -> None:
    """The same run once more from the end of its warm-up, cut in two, with a coin in the place of the reward."""
    directory, _, learned = grpo
    shutil.copytree(directory / "quickstart", tmp_path / "quickstart")
    shutil.rmtree(tmp_path / "quickstart" / "checkpoints" / "step_000210")
    before, after = accuracies("quickstart_coin_flip", tmp_path, "run.num_steps=10", "actor.parallel.pp_size=2")
    assert after < before + 0.05
    assert after < learned - 0.25
