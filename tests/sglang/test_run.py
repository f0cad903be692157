"""Runs that generate with real SGLang: what it drew is what the trainer's own weights say, after every push."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.run.export import export_checkpoint
from tests.e2e.runs import QUICKSTART, SHORT, Outcome, ledger, train

PYTHON = os.environ.get("MEGARL_SGLANG_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MEGARL_SGLANG_PYTHON names no interpreter with SGLang"),
]

NUM_WARMUP_STEPS, NUM_STEPS = 3, 5
TOLERANCE = 1e-3
# Rewards that differ within a group, so that every step changes the weights; and a copy of every sample.
REWARD = """
import json

def keep(kind, sample):
    line = {"kind": kind, "version": sample.version, "tokens": sample.token_ids.tolist(),
            "mask": sample.loss_mask.tolist(), "logprobs": sample.rollout_logprobs.tolist()}
    with open("drawn.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")

async def more_digits(prompt, sample):
    keep("drawn", sample)
    return sum(letter.isdigit() for letter in sample.response) / 12

async def greedy(prompt, sample):
    keep("greedy", sample)
    return 0.0
"""


def run(directory: Path, *overrides: str) -> Outcome:
    (directory / "digits.py").write_text(REWARD)
    return train(
        QUICKSTART,
        directory,
        *SHORT,
        f"warmup.num_steps={NUM_WARMUP_STEPS}",
        f"run.num_steps={NUM_STEPS}",
        "reward=null",
        "reward=digits:more_digits",
        "eval.sets.held_out.reward=digits:greedy",
        "checkpoint.every=1",
        "checkpoint.keep=100",
        "generation.engine=sglang",
        f"generation.python={PYTHON}",
        *overrides,
        timeout_seconds=900,
    )


def drawn(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """What the engine drew, by the version of its weights."""
    by_version: dict[int, list[dict[str, Any]]] = {}
    for line in (directory / "drawn.jsonl").read_text().splitlines():
        sample = json.loads(line)
        by_version.setdefault(sample["version"], []).append(sample)
    return by_version


def trained(outcome: Outcome, version: int, directory: Path) -> torch.nn.Module:
    """The trainer's weights of that version, in a model that is neither the trainer's nor the engine's."""
    export_checkpoint(outcome.directory, version, directory / f"version_{version}")
    model = AutoModelForCausalLM.from_pretrained(directory / f"version_{version}", dtype=torch.float32)
    return model.eval()


def logprobs_of(model: torch.nn.Module, sample: dict[str, Any]) -> torch.Tensor:
    """Of every token, at the places of the response."""
    own = torch.tensor(sample["mask"]).bool()[1:]
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([sample["tokens"]])).logits[0, :-1]
    return logits[own].log_softmax(-1)


def response_of(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([token for token, own in zip(sample["tokens"], sample["mask"], strict=True) if own])


def largest_gap(model: torch.nn.Module, samples: list[dict[str, Any]]) -> float:
    gaps = []
    for sample in samples:
        theirs = torch.tensor([x for x, own in zip(sample["logprobs"], sample["mask"], strict=True) if own])
        ours = logprobs_of(model, sample).gather(1, response_of(sample)[:, None])[:, 0]
        gaps.append((ours - theirs).abs().max().item())
    return max(gaps)


def require_greedy(model: torch.nn.Module, samples: list[dict[str, Any]]) -> None:
    for sample in samples:
        if sample["kind"] == "greedy":
            assert torch.equal(logprobs_of(model, sample).argmax(-1), response_of(sample))


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        ("tensor", ("run.num_ranks=2",)),
        ("broadcast", ("run.num_ranks=1",)),
        ("disk", ("run.num_ranks=1",)),
        ("tensor", ("run.num_ranks=1", "generation.router=start", "generation.num_servers=2")),
    ],
    ids=["tensor", "broadcast", "disk", "router"],
)
def test_every_push_arrives(transport: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    outcome = run(tmp_path, f"weights.transport={transport}", *settings)
    assert outcome.code == 0, outcome.stderr[-3000:]
    steps = {record["step"]: record["metrics"] for record in ledger(outcome)}
    last = NUM_WARMUP_STEPS + NUM_STEPS
    for step in range(NUM_WARMUP_STEPS + 1, last + 1):
        metrics = steps[step]
        assert metrics["mismatch/logprob_gap_max"] < TOLERANCE
        assert metrics["sample/model_version/min"] == metrics["sample/model_version/max"] == step - 1
        assert metrics["actor/grad_norm"] > 0
        assert metrics["engine/num_rejected"] == metrics["engine/num_retries"] == metrics["engine/num_restarts"] == 0
    by_version = drawn(tmp_path)
    versions = range(NUM_WARMUP_STEPS, last + 1)
    models = {version: trained(outcome, version, tmp_path) for version in versions}
    for version in versions:
        samples = by_version[version]
        assert {sample["kind"] for sample in samples} == ({"drawn", "greedy"} if version < last else {"greedy"})
        gap = largest_gap(models[version], samples)
        assert gap < TOLERANCE
        require_greedy(models[version], samples)
        if version > NUM_WARMUP_STEPS:  # weights that did not arrive would be seen
            assert largest_gap(models[version - 1], samples) > TOLERANCE
    check_remains(outcome, tmp_path)


def check_remains(outcome: Outcome, directory: Path) -> None:
    """No key in any log, and no server is left."""
    for log in (outcome.directory / "logs").glob("*.log"):
        assert not re.search(r"api_key['\"]?[:=]\s*['\"][A-Za-z0-9_-]{20,}", log.read_text(errors="replace")), log
    left = [process for process in psutil.process_iter(["cwd"]) if process.info["cwd"] == str(directory)]
    assert left == []
