"""Runs with rewards that fail: what the policy leaves is trained on, and too much of it ends the run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.e2e.runs import QUICKSTART, SHORT, train

REWARDS = """
import os

def now_and_then(prompt, sample):
    if sample.seed % 8 == 3:
        os._exit(1)
    return float(len(sample.response))

def mostly(prompt, sample):
    if sample.seed:
        raise ValueError("not today")
    return 0.0
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "failing.py").write_text(REWARDS)
    return tmp_path


@pytest.mark.slow
def test_a_run_goes_on_without_the_groups_that_failed(directory: Path) -> None:
    overrides = ("warmup=null", "run.num_steps=3", "scoring.max_failed_fraction=0.9", "rollout.prompts_per_step=6")
    rewards = "reward=[{name: failing:now_and_then, weight: 0.5}, {name: exact_match, options: {after: ':'}}]"
    outcome = train(QUICKSTART, directory, *SHORT, *overrides, rewards)
    assert outcome.code == 0, outcome.stderr
    lines = (outcome.directory / "metrics.jsonl").read_text().splitlines()
    steps = [entry["metrics"] for entry in map(json.loads, lines) if entry["step"] > 0]
    assert len(steps) == 3
    num_failed = sum(step["experience_pipeline/num_failed_samples"] for step in steps)
    num_lost = sum(step["experience_pipeline/num_failed_groups"] for step in steps)
    assert num_failed >= num_lost > 0
    for step in steps:
        assert all(math.isfinite(value) for value in step.values())
        kept = 6 - step["experience_pipeline/num_failed_groups"]
        assert step.get("experience_pipeline/experience_count", 0) == kept * 4
        if kept:
            total = 0.5 * step["rollout/now_and_then/mean"] + step["rollout/exact_match/mean"]
            assert step["critic/score/mean"] == pytest.approx(total)
    assert "ended its worker for " in outcome.stderr


@pytest.mark.slow
def test_too_many_failures_end_the_run_with_65(directory: Path) -> None:
    outcome = train(QUICKSTART, directory, *SHORT, "warmup=null", "reward=failing:mostly", "eval.before_training=false")
    assert outcome.code == 65, outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert 'MRL-2120 reward "failing:mostly" failed for ' in outcome.stderr
    assert "scoring.max_failed_fraction=0.25" in outcome.stderr
    assert "ValueError: 'not today' (failing.py:11)" in outcome.stderr
