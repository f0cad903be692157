"""Rollouts that were recorded, and training from them without an engine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl.data.record import read_steps
from tests.e2e.runs import ROOT, SHORT, Outcome, ledger, reproducible, train

pytestmark = pytest.mark.slow

# Rewards by chance: the policy moves in every step, which a task that is still too hard would not make it do.
COIN_FLIP = ROOT / "configs" / "quickstart_coin_flip.yaml"

# A replay has no engine: nothing is evaluated and nothing is pushed. It draws no prompts and asks no rewards.
_OF_ENGINES = re.compile(r"(eval|val|weights)/|alerts/H21|experience_pipeline/(num_failed_|too_long_)")
LONG = (*SHORT, "run.num_steps=20", "eval.sets={}")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(COIN_FLIP, tmp_path_factory.mktemp("recorded"), *LONG, "rollout.record=true")
    assert outcome.code == 0, outcome.stderr
    return outcome


def without_engines(outcome: Outcome) -> list[tuple[int, dict[str, float]]]:
    lines = [json.loads(line) for line in reproducible(outcome)]
    return [
        (step, {name: value for name, value in metrics.items() if not _OF_ENGINES.match(name)})
        for step, metrics in lines
        if step > 0
    ]


def test_a_replay_gives_the_same_bits(tmp_path: Path, recorded: Outcome) -> None:
    replayed = train(COIN_FLIP, tmp_path, *LONG, f"rollout.replay={recorded.directory / 'rollouts'}")
    assert replayed.code == 0, replayed.stderr
    assert without_engines(replayed) == without_engines(recorded)
    assert any(record["metrics"].get("actor/grad_norm", 0) > 0 for record in ledger(replayed)[-20:])
    assert not list((replayed.directory / "logs").glob("engine_*"))


def test_a_replay_in_another_layout_differs_by_rounding_alone(tmp_path: Path, recorded: Outcome) -> None:
    replay = f"rollout.replay={recorded.directory / 'rollouts'}"
    replayed = train(COIN_FLIP, tmp_path, *LONG, replay, "actor.parallel.tp_size=2")
    assert replayed.code == 0, replayed.stderr
    for (step, ours), (same_step, theirs) in zip(without_engines(replayed), without_engines(recorded), strict=True):
        assert step == same_step
        for name in ("critic/score/mean", "response_length/mean", "actor/lr", "sample/staleness/max"):
            assert ours.get(name) == theirs.get(name)
        for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/old_log_prob/mean"):
            if name in theirs:
                # Adam turns a rounding error of a tiny gradient into a whole step of a weight: 50 updates of that
                assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=2e-4), (step, name)


def test_a_run_that_only_generates_records_and_trains_nothing(tmp_path: Path) -> None:
    drawn = train(COIN_FLIP, tmp_path, *SHORT, "warmup=null", "rollout.only=true")
    assert drawn.code == 0, drawn.stderr
    assert not any("actor/grad_norm" in record["metrics"] for record in ledger(drawn))
    steps = read_steps(drawn.directory / "rollouts" / "step_000002.jsonl")
    versions = {sample.version for group in steps[2].groups for sample in group.samples}
    assert versions == {0}  # the weights never moved
