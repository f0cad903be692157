"""A run that a reward model scores, and what `megarl eval` makes of its checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.tiny_models import tiny_model
from tests.e2e.runs import QUICKSTART, SHORT, Outcome, environment, ledger, reproducible, train

pytestmark = pytest.mark.slow

SETTINGS = (
    *SHORT,
    "reward=[{name: model, weight: 0.5}, coin_flip]",
    "reward_model={path: judge, parallel: {tp_size: 2}}",
    "eval.sets.sampled={data: builtin:carry_held_out, num_samples: 4, temperature: 1.0, top_k: 8, max_prompts: 3, "
    "max_new_tokens: 20}",
    "eval.bench_sets.sorted={data: builtin:sort_held_out, max_prompts: 3, reward: exact_match}",
    "checkpoint={every: 1, keep: 9, best_metric: val/test_score/sampled}",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward_model")
    tiny_model(
        "llama", directory=path / "judge", head="ForSequenceClassification", num_labels=1, pad_token_id=0, vocab_size=64
    )
    return path


@pytest.fixture(scope="module")
def run(directory: Path) -> Outcome:
    outcome = train(QUICKSTART, directory, *SETTINGS)
    assert outcome.code == 0, outcome.stderr
    return outcome


def megarl(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "megarl", *words]
    return subprocess.run(
        line, capture_output=True, text=True, cwd=directory, env=environment(), check=False, timeout=300
    )


def evaluated(directory: Path, *words: str) -> tuple[dict[str, Any], str]:
    """The JSON and the console of `megarl eval`."""
    result = megarl(directory, "eval", str(QUICKSTART), f"run.dir={directory}", *SETTINGS, *words)
    assert result.returncode == 0, result.stderr
    return json.loads(Path(directory / result.stdout.split("Written to ")[1].strip()).read_text()), result.stdout


def as_bench(metrics: dict[str, float]) -> dict[str, float]:
    """What a run's evaluation says, under the names of `megarl eval`."""
    return {
        "/".join(["bench", *name.split("/")[1:]]): value
        for name, value in metrics.items()
        if name.startswith(("eval/", "bench/"))
    }


def test_the_reward_model_has_a_phase_of_its_own(run: Outcome) -> None:
    records = [record["metrics"] for record in ledger(run)]
    sampled = [metrics for metrics in records if "timing_s/reward" in metrics]
    assert len(sampled) == 2
    for metrics in sampled:
        assert metrics["time/reward/compute_rewards/onload"] > 0
        assert metrics["time/reward/compute_rewards/offload"] > 0
        assert {f"memory/reward/compute_rewards/end/onload/max_allocated/{rank}" for rank in (0, 1)} <= metrics.keys()
        assert metrics["critic/score/max"] > metrics["critic/score/min"], "a random model has preferences"
        assert metrics["rollout/model/max"] % 1 > 0, "its scores are no counts"
        together = 0.5 * metrics["rollout/model/mean"] + metrics["rollout/coin_flip/mean"]
        assert metrics["critic/score/mean"] == pytest.approx(together, rel=1e-5), "summed in fp32"
    assert {"eval/sampled/score/best@4", "val/score/mean", "bench/sorted/score/mean@1"} <= records[-1].keys()


def test_a_resumed_run_is_the_same(run: Outcome, directory: Path) -> None:
    """Its last step is made again from the checkpoint before it; the reward model is read from its directory."""
    again = directory / "again"
    shutil.copytree(run.directory, again / run.directory.name)
    newest = sorted((again / run.directory.name / "checkpoints").glob("step_*"))[-1]
    shutil.rmtree(newest)
    outcome = train(QUICKSTART, again, *SETTINGS, cwd=directory)
    assert outcome.code == 0, outcome.stderr
    assert "Resuming at step 5 of 5" in outcome.stdout
    assert reproducible(outcome) == reproducible(run)


def test_an_evaluation_repeats_that_of_the_run(run: Outcome, directory: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.directory.glob("*")}
    result, console = evaluated(directory, "--model", str(run.directory))
    assert result["metrics"] == as_bench(ledger(run)[-1]["metrics"]), "to the last bit"
    assert (result["step"], result["sets"]["sampled"]["num_prompts"]) == (5, 3)
    assert result["made_with"].keys() >= {"megarl", "torch"}
    for row in ("held_out", "sampled", "sorted"):
        assert f"\n{row} " in console
    after = {path: path.stat().st_mtime_ns for path in run.directory.glob("*")}
    assert {path: time for path, time in after.items() if path.name != "eval"} == before, "the run is left alone"


def test_the_best_checkpoint_is_kept_and_evaluated(run: Outcome, directory: Path) -> None:
    records = {record["step"]: record["metrics"] for record in ledger(run)}
    best = max(range(3, 6), key=lambda step: records[step]["eval/sampled/score/mean@4"])
    out = directory / "results" / "best.json"
    words = ("--model", str(run.directory), "--step", "best", "--set", "held_out", "--set", "sampled")
    result, _ = evaluated(directory, *words, "--out", str(out))
    assert json.loads(out.read_text()) == result
    expected = {name: value for name, value in as_bench(records[best]).items() if "/sorted/" not in name}
    assert (result["step"], result["metrics"]) == (best, expected)
