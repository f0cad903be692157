"""A run that filters groups and refills its steps, also where nothing is left to train on; killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ROOT, SHORT, Outcome, ledger, reproducible, train

pytestmark = pytest.mark.slow

COIN_FLIP = ROOT / "configs" / "quickstart_coin_flip.yaml"
FILTERED = (
    *SHORT,
    "run.num_steps=6",
    # one group at a time, half of which the filter drops: fewer than there are ranks, and sometimes none
    "rollout.prompts_per_step=1",
    "algorithm.num_minibatches=1",
    "rollout.group_size=2",
    "rollout.filters=[zero_variance]",
    "rollout.max_refills=1",
    "algorithm.normalize_rewards=running",
    "algorithm.normalize_by_std=false",
    "checkpoint.every=1",
    "eval.sets={}",
    "eval.every=0",
    "warmup.num_steps=1",
    "warmup.optimizer.warmup_steps=0",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(COIN_FLIP, tmp_path_factory.mktemp("whole"), *FILTERED, "rollout.record=true")
    assert outcome.code == 0, outcome.stderr
    return outcome


def test_what_is_drawn_dropped_and_kept_adds_up(whole: Outcome) -> None:
    steps = [record["metrics"] for record in ledger(whole) if record["step"] > 1]
    assert len(steps) == 6
    assert {metrics["experience_pipeline/num_refills"] for metrics in steps} == {0, 1}
    for metrics in steps:
        num_kept = metrics["experience_pipeline/experience_count"] / 2
        num_dropped = metrics["experience_pipeline/filter/zero_variance/dropped_groups"]
        assert metrics["experience_pipeline/num_drawn_groups"] == num_kept + num_dropped
        assert num_kept <= 1
        assert ("actor/grad_norm" in metrics) == (num_kept > 0)


def test_a_step_of_which_nothing_is_left_learns_nothing_and_is_no_error(whole: Outcome) -> None:
    empty = [
        record["step"] for record in ledger(whole) if record["metrics"].get("experience_pipeline/experience_count") == 0
    ]
    assert empty
    assert whole.stderr.count("MRL-2412") == len(empty)
    for step in empty:
        (line,) = (whole.directory / f"rollouts/step_{step:06d}.jsonl").read_text().splitlines()
        assert json.loads(line)["num_groups"] == 0


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, whole: Outcome) -> None:
    killed = train(COIN_FLIP, tmp_path, *FILTERED, "rollout.record=true", fault="step/update::6=kill")
    assert killed.code != 0
    resumed = train(COIN_FLIP, tmp_path, *FILTERED, "rollout.record=true")
    assert resumed.code == 0, resumed.stderr
    assert reproducible(resumed) == reproducible(whole)
    for path in sorted((whole.directory / "rollouts").iterdir()):
        assert (resumed.directory / "rollouts" / path.name).read_bytes() == path.read_bytes()
