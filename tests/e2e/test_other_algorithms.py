"""Supervised fine-tuning alone, and an algorithm of the user's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import QUICKSTART, SHORT, train

pytestmark = pytest.mark.slow

BEST_OF_GROUP = """
import torch


class BestOfGroup:
    num_epochs = 2

    def __init__(self, strength):
        self.strength = strength

    def credit_groups(self, groups, meter):
        for group in groups:
            best = max(sample.reward for sample in group.samples)
            for sample in group.samples:
                sample.advantage = self.strength * float(sample.reward == best)

    def credit_tokens(self, batch, world, meter):
        for micro in batch.microbatches():
            micro.advantages = micro.credit[micro.sequence_of_token] * micro.loss_mask
        return batch

    def policy_loss(self, logprobs, entropy, micro, meter):
        loss = -(logprobs * micro.advantages * micro.loss_weight).sum()
        meter.loss("actor/pg_loss", loss.detach())
        return loss
"""


def records(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_sft_alone_needs_no_engine(tmp_path: Path) -> None:
    outcome = train(
        QUICKSTART, tmp_path, "algorithm=null", "algorithm={name: sft, batch_size: 16}", "rollout=null", "warmup=null",
        "eval.sets=null", "eval.sets={}", "eval.every=0", "run.num_steps=4", "run.num_ranks=1",
        "actor.optimizer={lr: 5e-3, schedule: constant, min_lr_ratio: 1.0, weight_decay: 0.1}",
    )  # fmt: skip
    assert outcome.code == 0, outcome.stderr
    losses = [record["actor/sft_loss"] for record in records(outcome.directory)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert "warm-up" not in outcome.stdout


def test_an_algorithm_by_import_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BEST_OF_GROUP)
    overrides = (*SHORT, "algorithm=null", "algorithm={name: 'mine:BestOfGroup', options: {strength: 2.0}}")
    outcome = train(QUICKSTART, tmp_path, *overrides)
    assert outcome.code == 0, outcome.stderr
    last = records(outcome.directory)[-1]
    assert last["actor/pg_loss"] > 0
    # two epochs of one minibatch: the schedule's last update is the run's last
    assert last["actor/lr"] == pytest.approx(8e-5)
    refused = train(QUICKSTART, tmp_path, *overrides[:-1], "algorithm={name: 'mine:BestOfGroup', options: {force: 1}}")
    assert refused.code == 64
    assert "MRL-1304" in refused.stderr
    assert "force" in refused.stderr
