"""A layout changes nothing beyond float noise: three steps of PPO from the same recorded rollouts, actor and critic, in
every layout against one process. The measured differences are the table of docs/parity.md.

``MEGARL_UPDATE_DOCS=1 pytest tests/distributed/test_parity.py`` writes the table anew.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.distributed.tiny_models import tiny_model
from tests.distributed.training_jobs import assemble, train_job

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"
PPO: dict[str, Any] = {
    "name": "ppo",
    "value_clip": 0.2,
    "entropy_coef": 0.01,
    "loss_aggregation": "sequence-mean-token-mean",
    "kl": {"coef": 0.1, "estimator": "k1", "apply_to": "reward"},
}
TOLERANCES = {
    # relative, where the loss is above 1: a sum of some hundred tokens in fp32, whose order moves the seventh digit
    "loss": 2e-6,
    # relative; the norm is a sum over all parameters
    "grad norm": 5e-6,
    # of the tensor's largest entry: fp32 gradients of four layers, summed in another order
    "gradient": 2e-5,
    # Adam divides a gradient by its own size, so where it is nearly zero rounding becomes a visible update. Three
    # steps at lr 1e-3 with eps 1e-5 move weights by up to 3e-3; the largest difference seen is 1.2e-6.
    "weights": 5e-6,
}


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    num_ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    tied: bool = False
    critic_sizes: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 128


SP = {"tp_size": 2, "sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp": {"bucket_size": 20000}}
CASES = [
    Case("one sequence at a time", 1, max_tokens=1),
    Case("recompute full", 1, options={"recompute": "full"}),
    Case("recompute selective", 1, options={"recompute": "selective"}),
    Case("log-probs 7 tokens at a time", 1, options={"logprob_chunk_tokens": 7}),
    Case("tp2", 2, {"tp_size": 2}),
    Case("tp2, log-probs 7 tokens at a time", 2, {"tp_size": 2}, options={"logprob_chunk_tokens": 7}),
    Case("tp2 sp", 2, SP),
    Case("tp2 sp, recompute full", 2, SP, options={"recompute": "full"}),
    Case("tp2 sp, recompute selective", 2, SP, options={"recompute": "selective"}),
    Case("pp2", 2, {"pp_size": 2}),
    Case("pp2, stages of 1 and 3 layers", 2, {"pp_size": 2, "stage_layers": [1, 3]}),
    Case("pp2 vpp2", 2, {"pp_size": 2, "vpp_size": 2}),
    Case("pp2, recompute full", 2, {"pp_size": 2}, options={"recompute": "full"}),
    Case("dp2", 2),
    Case("dp2, overlapped", 2, training=OVERLAP),
    Case("cp2", 2, {"cp_size": 2}),
    Case("cp2, recompute full", 2, {"cp_size": 2}, options={"recompute": "full"}),
    Case("tp2, critic dp2", 2, {"tp_size": 2}, critic_sizes={}),
    Case("dp2, critic pp2", 2, {}, critic_sizes={"pp_size": 2}),
    Case("tp2 pp2", 4, {"tp_size": 2, "pp_size": 2}),
    Case("tp2 sp dp2", 4, SP),
    Case("tp2 sp dp2, overlapped", 4, SP, training=OVERLAP),
    Case("pp2 dp2", 4, {"pp_size": 2}),
    Case("tp2 sp pp2 vpp2", 4, {**SP, "pp_size": 2, "vpp_size": 2}),
    Case("cp2 dp2", 4, {"cp_size": 2}),
    Case("tp2 sp cp2", 4, {**SP, "cp_size": 2}),
    Case("cp2 pp2", 4, {"cp_size": 2, "pp_size": 2}),
    Case("tp2 pp2, critic tp2 sp cp2", 4, {"tp_size": 2, "pp_size": 2}, critic_sizes={**SP, "cp_size": 2}),
    Case("tp2", 2, {"tp_size": 2}, "qwen3", tied=True),
    Case("pp2", 2, {"pp_size": 2}, "qwen3", tied=True),
    Case("pp2 vpp2", 2, {"pp_size": 2, "vpp_size": 2}, "qwen3", tied=True),
    Case("cp2", 2, {"cp_size": 2}, "qwen3", tied=True),
    Case("tp2 sp pp2", 4, {**SP, "pp_size": 2}, "qwen3", tied=True),
    Case("recompute full", 1, family="qwen3_moe", options={"recompute": "full"}),
    Case("tp2 sp", 2, SP, "qwen3_moe"),
    Case("tp2 sp etp1 ep2", 2, {**SP, "etp_size": 1, "ep_size": 2}, "qwen3_moe"),
    Case("ep2", 2, {"ep_size": 2}, "qwen3_moe"),
    Case("ep2, overlapped", 2, {"ep_size": 2}, "qwen3_moe", training=OVERLAP),
    Case("pp2", 2, {"pp_size": 2}, "qwen3_moe"),
    Case("pp2 vpp2", 2, {"pp_size": 2, "vpp_size": 2}, "qwen3_moe"),
    Case("dp2", 2, {}, "qwen3_moe"),
    Case("cp2", 2, {"cp_size": 2}, "qwen3_moe"),
    Case("ep2 pp2", 4, {"ep_size": 2, "pp_size": 2}, "qwen3_moe"),
    Case("ep2 dp2", 4, {"ep_size": 2}, "qwen3_moe"),
    Case("ep2 cp2", 4, {"ep_size": 2, "cp_size": 2}, "qwen3_moe"),
    Case("tp2 sp ep2", 4, {**SP, "ep_size": 2}, "qwen3_moe"),
    Case("tp2 sp pp2", 4, {**SP, "pp_size": 2}, "qwen3_moe"),
    Case("tp2 sp etp1 ep4", 4, {**SP, "etp_size": 1, "ep_size": 4}, "qwen3_moe"),
    Case("tp2 sp ep2", 4, {**SP, "ep_size": 2}, "qwen2_moe"),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    found = {}
    for family, tied in sorted({(case.family, case.tied) for case in CASES}):
        directory = tmp_path_factory.mktemp(f"{family}-{tied}")
        tiny_model(family, tied=tied, directory=directory)
        found[family, tied] = directory
    return found


@pytest.fixture(scope="module")
def one_process(gang: Any, directories: dict[tuple[str, bool], Path]) -> dict[tuple[str, bool], list[dict[str, Any]]]:
    """Three steps on one rank, without any option."""
    return {
        key: gang(1).run(
            train_job, directory=str(path), algorithm=PPO, num_steps=3, options={"logprob_chunk_tokens": 0}
        )
        for key, path in directories.items()
    }


@pytest.fixture(scope="module")
def rows() -> dict[int, dict[str, dict[str, float]]]:
    return {}


def differences(results: list[dict[str, Any]], expected: list[dict[str, Any]], role: str) -> dict[str, float]:
    """Largest differences over all steps, parameters and ranks."""
    loss = {"actor": "actor/pg_loss", "critic": "critic/vf_loss"}[role]
    metrics, wanted = results[0]["metrics"], expected[0]["metrics"]
    ours, theirs = (assemble([rank["gradients"][role] for rank in each]) for each in (results, expected))
    assert ours.keys() == theirs.keys()
    weights = expected[0]["weights"][role]
    for rank in results:
        assert rank["weights"][role].keys() == weights.keys()
    norm = f"{role}/grad_norm"
    return {
        "loss": max(abs(a[loss] - b[loss]) / max(1, abs(b[loss])) for a, b in zip(metrics, wanted, strict=True)),
        "grad norm": max(abs(a[norm] - b[norm]) / b[norm] for a, b in zip(metrics, wanted, strict=True)),
        "gradient": max(float(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max()) for n in theirs),
        "weights": max(
            float(np.abs(rank["weights"][role][name] - whole).max())
            for rank in results
            for name, whole in weights.items()
        ),
    }


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{case.family}-{case.name}" for case in CASES])
def test_layouts_train_alike(
    number: int, gang: Any, directories: dict[Any, Path], one_process: dict[Any, Any], rows: dict[int, Any]
) -> None:
    case = CASES[number]
    results = gang(case.num_ranks).run(
        train_job,
        parallel=case.sizes,
        directory=str(directories[case.family, case.tied]),
        algorithm=PPO,
        sizes=case.sizes,
        critic_sizes=case.critic_sizes,
        options=case.options,
        training=case.training,
        max_tokens=case.max_tokens,
        num_steps=3,
    )
    expected = one_process[case.family, case.tied]
    rows[number] = {role: differences(results, expected, role) for role in ("actor", "critic")}
    for role, found in rows[number].items():
        for what, value in found.items():
            assert value <= TOLERANCES[what], f"{role}: {what} differs by {value:.1e}"


def test_the_comparison_can_fail(one_process: dict[Any, Any]) -> None:
    """Three steps really moved the weights, and gradients of tied and untied models are not the same."""
    first, other = (one_process[key] for key in (("llama", False), ("qwen3", True)))
    assert first[0]["metrics"][0]["actor/grad_norm"] != other[0]["metrics"][0]["actor/grad_norm"]
    for role in ("actor", "critic"):
        gradients = assemble([first[0]["gradients"][role]])
        assert all(np.abs(gradient).max() > 0 for gradient in gradients.values())


def label(case: Case) -> str:
    kind = "mixture of experts" if case.family.endswith("moe") else "dense"
    return f"{case.name} | {case.num_ranks} | {kind}, {case.family}, {'tied' if case.tied else 'untied'}"


def test_the_table_is_in_the_docs(rows: dict[int, dict[str, dict[str, float]]]) -> None:
    if os.environ.get("MEGARL_UPDATE_DOCS"):
        assert len(rows) == len(CASES), "run all of this file to write the table"
        before, _, _ = DOCUMENT.read_text(encoding="utf-8").partition("| layout |")
        head = "| layout | ranks | model | role | " + " | ".join(TOLERANCES) + " |\n|" + "---|" * 8 + "\n"
        lines = [
            f"| {label(CASES[number])} | {role} | " + " | ".join(f"{found[what]:.1e}" for what in TOLERANCES) + " |\n"
            for number, roles in sorted(rows.items())
            for role, found in roles.items()
        ]
        DOCUMENT.write_text(before + head + "".join(lines), encoding="utf-8")
    table = DOCUMENT.read_text(encoding="utf-8")
    missing = [label(case) for case in CASES if f"| {label(case)} | actor |" not in table]
    assert not missing, "docs/parity.md lacks rows; see the first lines of this file"
