"""A run that is killed and started again ends like one that never was."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.store import open_checkpoint
from megarl.core.faults import POINTS
from tests.e2e.runs import QUICKSTART, ROOT, SHORT, Outcome, ledger, reproducible, train

pytestmark = pytest.mark.slow

LAST_STEP = 5
# Reached only when a step is saved once more, or by a run that has more checkpoints than it keeps.
NOT_IN_EVERY_SAVE = ("save/set-aside", "save/removing")
LAYOUTS = {
    "dp2": (QUICKSTART, ()),
    "tp2": (
        ROOT / "configs" / "quickstart_ppo.yaml",
        ("actor.parallel.tp_size=2", "algorithm.critic_warmup_steps=1"),
    ),
}


def go(layout: str, directory: Path, *others: str, fault: str | None = None) -> Outcome:
    config, overrides = LAYOUTS[layout]
    settings = (*SHORT, "run.name=quickstart", "checkpoint.every=1", *overrides, *others)
    directory.mkdir(exist_ok=True)
    return train(config, directory, *settings, fault=fault)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """For each layout, the run that nobody interrupted."""

    @cache
    def run(layout: str) -> Outcome:
        outcome = go(layout, tmp_path_factory.mktemp("whole"))
        assert outcome.code == 0, outcome.stderr
        return outcome

    return run


def kills(layout: str) -> list[str]:
    """A fault in one step after the other, at any point, on whichever rank comes to it first.

    (`tools/kill_runs.py` kills ten times in each layout, at any moment.)
    """
    generator = random.Random(layout)
    points = [point for point in POINTS if point not in NOT_IN_EVERY_SAVE]
    steps = sorted(generator.sample(range(1, LAST_STEP), 2 if layout == "dp2" else 1))
    return [f"{generator.choice(points)}::{step}=kill" for step in steps]


def saved_tensors(outcome: Outcome) -> dict[str, torch.Tensor]:
    """Weights and moments of the last step."""
    checkpoint = open_checkpoint(outcome.directory / "checkpoints", LAST_STEP)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_runs_end_like_one_that_never_was(layout: str, whole: Callable[[str], Outcome], tmp_path: Path) -> None:
    for fault in kills(layout):
        killed = go(layout, tmp_path, fault=fault)
        assert (killed.code, "SIGKILL" in killed.stderr) == (70, True), (fault, killed.stdout, killed.stderr)
        assert "Run the same command" in killed.stderr
    resumed = go(layout, tmp_path)
    assert resumed.code == 0, resumed.stderr
    assert f" of {LAST_STEP} from checkpoints/step_" in resumed.stdout
    assert f"(restart {len(kills(layout))})" in resumed.stdout
    assert reproducible(resumed) == reproducible(whole(layout))
    expected, found = saved_tensors(whole(layout)), saved_tensors(resumed)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any("exp_avg" in name for name in expected)


def test_a_run_goes_on_in_another_layout(whole: Callable[[str], Outcome], tmp_path: Path) -> None:
    """From two replicas to one model cut in two, in the middle of the warm-up."""
    killed = go("dp2", tmp_path, "checkpoint.asynchronous=false", fault="step/rollout::2=kill")
    assert killed.code == 70, killed.stderr
    resumed = go("dp2", tmp_path, "actor.parallel.tp_size=2")
    assert resumed.code == 0, resumed.stderr
    assert "Resuming at step 2 of 5" in resumed.stdout
    assert "actor.parallel.tp_size: was 1, is 2" in resumed.stdout
    assert "another layout" in resumed.stdout
    for before, after in zip(ledger(whole("dp2"))[2:4], ledger(resumed)[2:4], strict=True):
        for name in ("actor/sft_loss", "actor/grad_norm"):
            # fp32 sums in another order, over two steps
            assert after["metrics"][name] == pytest.approx(before["metrics"][name], rel=1e-5)
