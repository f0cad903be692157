"""Training on conversations with a tool: the same samples from any engines in any layout, and what is learned."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megarl.core.sample import Sample
from megarl.data.record import read_steps
from tests.e2e.runs import ROOT, Outcome, ledger, train
from tests.e2e.test_servers import samples_and_weights

pytestmark = pytest.mark.slow

CALCULATOR = ROOT / "examples" / "calculator_tool" / "config.yaml"
# Random weights write a question mark often enough to make conversations of several turns; rewards by chance move them.
TINY = (
    "run.name=quickstart",  # where `train` looks for the run
    "run.num_steps=2",
    "warmup=null",
    "reward=coin_flip",
    "rollout.prompts_per_step=8",
    "rollout.group_size=4",
    "rollout.record=true",
    "eval.every=0",
    "eval.sets={}",
)


def run(directory: Path, *overrides: str) -> Outcome:
    outcome = train(CALCULATOR, directory, *TINY, *overrides, cwd=ROOT)
    assert outcome.code == 0, outcome.stderr
    return outcome


def drawn(outcome: Outcome, step: int) -> list[Sample]:
    steps = read_steps(outcome.directory / "rollouts" / f"step_{step:06d}.jsonl")
    return [sample for group in steps[step].groups for sample in group.samples]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run(tmp_path_factory.mktemp("two_ranks"))


def test_tool_output_is_masked_and_the_rest_is_what_the_engine_drew(two_ranks: Outcome) -> None:
    samples = drawn(two_ranks, 1)
    assert any(len(sample.turns) > 1 for sample in samples)
    for sample in samples:
        told = [turn.num_tokens for turn in sample.turns if turn.speaker == "environment"]
        num_prompt = len(sample.token_ids) - sum(turn.num_tokens for turn in sample.turns)
        assert (sample.loss_mask[num_prompt:] == 0).sum() == sum(told)
        assert np.all(sample.rollout_logprobs[sample.loss_mask == 0] == 0)
    for record in ledger(two_ranks)[-2:]:
        metrics = record["metrics"]
        # the trainer's own log-probs of the policy's tokens, each in its place among the tool's: float32 rounding
        assert 0 < metrics["mismatch/logprob_gap_max"] < 1e-3
        assert metrics["actor/grad_norm"] > 0
        assert metrics["rollout/num_turns/max"] > 1
        gap = metrics["response_length/mean"] - metrics["tokens/response_length/mean"]
        assert gap == pytest.approx(metrics["rollout/num_tool_tokens/mean"])


def test_one_rank_draws_the_same(two_ranks: Outcome, tmp_path: Path) -> None:
    alone = run(tmp_path, "run.num_ranks=1", "run.num_steps=1")
    assert [seen(sample) for sample in drawn(alone, 1)] == [seen(sample) for sample in drawn(two_ranks, 1)]


def test_servers_give_the_same_run(two_ranks: Outcome, tmp_path: Path) -> None:
    served = run(tmp_path, "generation.num_servers=2")
    for step in (1, 2):
        assert [seen(sample) for sample in drawn(served, step)] == [seen(sample) for sample in drawn(two_ranks, step)]
    assert samples_and_weights(served) == samples_and_weights(two_ranks)


def seen(sample: Sample) -> tuple[object, ...]:
    return sample.token_ids.tolist(), sample.rollout_logprobs.tolist(), sample.turns, sample.outcome, sample.finish
