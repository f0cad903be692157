"""One short run of the quickstart, looked at from all sides."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from megarl.metrics.registry import check
from tests.e2e.runs import QUICKSTART, SHORT, Outcome, ledger, reproducible, train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(QUICKSTART, tmp_path_factory.mktemp("runs"), *SHORT)
    assert outcome.code == 0, outcome.stderr
    return outcome


def test_every_step_is_on_the_console_and_in_the_ledger(short_run: Outcome) -> None:
    assert [line.split(" - ")[0] for line in short_run.steps] == [f"step:{n}" for n in range(6)]
    assert [record["step"] for record in ledger(short_run)] == list(range(6))
    progress = [line for line in short_run.stderr.splitlines() if line.startswith("Training Progress")]
    assert len(progress) == 5
    assert progress[-1].startswith("Training Progress: 100%")


def test_every_metric_is_in_the_catalogue(short_run: Outcome) -> None:
    for record in ledger(short_run):
        for name in record["metrics"]:
            check(name)


def test_the_engine_agrees_with_the_trainer(short_run: Outcome) -> None:
    gaps = [record["metrics"].get("mismatch/logprob_gap_max") for record in ledger(short_run)[-2:]]
    assert all(gap is not None and gap < 1e-4 for gap in gaps), gaps


def test_phase_times_account_for_the_step(short_run: Outcome) -> None:
    """The parts of a phase add up, and the phases fill most of a step."""
    metrics = ledger(short_run)[-1]["metrics"]
    phases = {name.split("/total")[0] for name in metrics if re.fullmatch(r"time/[^/]+/[^/]+/total", name)}
    assert phases == {
        f"time/{phase}"
        for phase in (
            "actor_infer/generate",
            "reward/compute_rewards",
            "actor_train/compute_log_probs",
            "actor_train/train_step",
            "actor_train/model_update",
        )
    }
    for phase in phases:
        parts = sum(metrics[f"{phase}/{part}"] for part in ("onload", "execute", "offload"))
        assert 0 < parts <= metrics[f"{phase}/total"] + 1e-9  # sums of the same clock, added in another order


def test_the_summary_closes_the_run(short_run: Outcome) -> None:
    summary = short_run.stdout.split("Summary")[1]
    assert re.search(r"held_out: +[0-9.]+% before \(step 3\) +-> +[0-9.]+% after \(step 5\)", summary)
    assert "actor_train/train_step" in summary
    assert str(short_run.directory) in summary


def test_the_log_guide_of_verl_works_on_our_log(short_run: Outcome, tmp_path: Path) -> None:
    """Every shell recipe of the guide that people read veRL logs with."""
    log = tmp_path / "run.log"
    log.write_text(short_run.stdout + short_run.stderr)

    def shell(recipe: str) -> list[str]:
        result = subprocess.run(["bash", "-c", recipe], capture_output=True, text=True, cwd=tmp_path, check=True)
        return result.stdout.splitlines()

    assert len(shell('tail -100 run.log | grep "^step:"')) == 6
    assert len(shell('grep "Training Progress" run.log | tail -5')) == 5
    assert len(shell('grep "step:4 " run.log')) == 1
    assert len(shell('grep "val/test_score" run.log')) == 4  # opening, end of the warm-up, steps 4 and 5
    scores = shell('grep "^step:" run.log | grep -o "critic/score/mean:[0-9.]*" | cut -d: -f2')
    assert len(scores) == 2
    assert all(0 <= float(score) <= 1 for score in scores)
    times = shell('grep "^step:" run.log | grep -o "timing_s/step:[0-9.]*" | cut -d: -f2')
    assert len(times) == 5
    assert all(float(seconds) > 0 for seconds in times)
    recent = shell(
        'grep "^step:" run.log | tail -10 | '
        r'grep -o "training/global_step:[0-9]* \|critic/score/mean:[0-9.]* \|timing_s/step:[0-9.]*"'
    )
    assert len(recent) == 6 + 2 + 5


def test_the_same_command_gives_the_same_ledger(short_run: Outcome) -> None:
    """Also from ``resolved.yaml``; the first run's directory is kept out of the way."""
    before = reproducible(short_run)
    again = train(short_run.directory / "resolved.yaml", short_run.directory.parent, "--fresh")
    assert again.code == 0, again.stderr
    assert reproducible(again) == before
    kept = short_run.directory.with_name("quickstart.1")
    assert (kept / "metrics.jsonl").is_file()
    assert len(before) == 6
    assert len(json.loads(before[-1])[1]) > 40


def test_offload_off_gives_the_same_ledger(short_run: Outcome, tmp_path: Path) -> None:
    outcome = train(QUICKSTART, tmp_path, *SHORT, "actor.offload=false")
    assert outcome.code == 0, outcome.stderr
    assert reproducible(outcome) == reproducible(short_run)
