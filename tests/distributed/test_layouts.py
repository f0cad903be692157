"""A layout changes nothing beyond float noise in any metric: two training steps with several optimizer steps each, from
the same recorded rollouts, on 1 rank, TP2, PP2 and DP2. (Gradients, PPO and all other layouts: test_parity.py.)
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from tests.distributed.tiny_models import tiny_model
from tests.distributed.training_jobs import train_job

# name: (ranks, tp_size, pp_size); the remaining ranks are data-parallel
LAYOUTS = {
    "tp2": (2, 2, 1),
    "pp2": (2, 1, 2),
    "dp2": (2, 1, 1),
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {
        "name": "grpo",
        "num_minibatches": 2,
        "num_epochs": 2,
        "entropy_coef": 0.01,
        "dual_clip": 3.0,
        "kl": {"coef": 0.1},
    },
    "ppo": {
        "name": "ppo",
        "num_minibatches": 2,
        "value_clip": 0.2,
        "loss_aggregation": "sequence-mean-token-mean",
        "kl": {"coef": 0.1, "estimator": "k1", "apply_to": "reward"},
    },
}
# Gradients agree to 1e-7, but Adam divides each by its own size, so the smallest ones turn rounding into visible
# updates. With eps=1e-5 and lr=1e-3 the largest difference seen over all layouts is 1e-6 after two steps, which move
# weights by 2e-3 to 8e-3.
WEIGHT_TOLERANCE = 5e-6
METRIC_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", tied=True, directory=directory)
    return directory


@pytest.fixture(scope="module")
def one_rank(gang: Any, model_directory: Path) -> dict[str, Any]:
    return {
        name: gang(1).run(train_job, directory=str(model_directory), algorithm=settings)[0]
        for name, settings in ALGORITHMS.items()
    }


def assert_same_training(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            assert math.isclose(ours[name], theirs[name], rel_tol=METRIC_TOLERANCE, abs_tol=METRIC_TOLERANCE), name
    for role, weights in expected["weights"].items():
        assert result["weights"][role].keys() == weights.keys()
        for name, tensor in weights.items():
            assert np.abs(result["weights"][role][name] - tensor).max() < WEIGHT_TOLERANCE, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_alike(layout: str, gang: Any, model_directory: Path, one_rank: dict[str, Any]) -> None:
    algorithm = "grpo"
    num_ranks, tp_size, pp_size = LAYOUTS[layout]
    results = gang(num_ranks).run(
        train_job,
        tp_size,
        pp_size,
        directory=str(model_directory),
        algorithm=ALGORITHMS[algorithm],
        sizes={"tp_size": tp_size, "pp_size": pp_size},
    )
    assert_same_training(results[0], one_rank[algorithm])
    for role, weights in results[0]["weights"].items():
        for name, tensor in weights.items():
            for other in results[1:]:
                assert np.array_equal(tensor, other["weights"][role][name]), f"ranks disagree about {name}"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_packing_changes_nothing(algorithm: str, gang: Any, model_directory: Path, one_rank: dict[str, Any]) -> None:
    """A budget of one token puts every sequence into a micro-batch of its own."""
    alone = gang(1).run(train_job, directory=str(model_directory), algorithm=ALGORITHMS[algorithm], max_tokens=1)[0]
    assert_same_training(alone, one_rank[algorithm])


def test_a_replica_without_sequences_adds_nothing(gang: Any, model_directory: Path) -> None:
    """One sequence on two replicas: the other one computes a filler, which must not count."""
    settings = ALGORITHMS["ppo"] | {"num_minibatches": 1}
    arguments = {"directory": str(model_directory), "algorithm": settings, "num_groups": 1, "group_size": 1}
    alone = gang(1).run(train_job, **arguments)[0]
    shared = gang(2).run(train_job, **arguments)
    assert_same_training(shared[0], alone)


def test_training_moves_the_weights(one_rank: dict[str, Any], model_directory: Path) -> None:
    """The comparisons above could not fail if nothing was learned."""
    start = load_file(model_directory / "model.safetensors")
    for result in one_rank.values():
        moved = max(np.abs(result["weights"]["actor"][name] - start[name]).max() for name in start)
        assert moved > 1e-3
        assert result["metrics"][0]["actor/grad_norm"] > 1e-3


def test_bf16_trains_like_fp32_and_survives_offloading(
    gang: Any, model_directory: Path, one_rank: dict[str, Any]
) -> None:
    """bf16 weights with fp32 main weights and gradients, sharded over two replicas."""
    arguments = {
        "directory": str(model_directory),
        "algorithm": ALGORITHMS["ppo"],
        "options": {"dtype": torch.bfloat16},
    }
    plain, offloaded = (gang(2).run(train_job, **arguments, offload=offload) for offload in (False, True))
    assert plain[0]["metrics"] == offloaded[0]["metrics"], "offload cycles change no bit"
    ours, theirs = plain[0]["metrics"][0], one_rank["ppo"]["metrics"][0]
    for name in ("critic/vf_loss", "actor/grad_norm", "critic/grad_norm"):
        # bf16 has 8 bits: every product and sum of four layers is rounded by up to 0.4 %
        assert math.isclose(ours[name], theirs[name], rel_tol=0.05), (name, ours[name], theirs[name])
    start = load_file(model_directory / "model.safetensors")
    moved = max(np.abs(plain[0]["weights"]["actor"][name] - start[name]).max() for name in start)
    assert moved > 1e-3


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_offload_cycles_change_no_bit(
    algorithm: str, gang: Any, model_directory: Path, one_rank: dict[str, Any]
) -> None:
    result = gang(1).run(train_job, directory=str(model_directory), algorithm=ALGORITHMS[algorithm], offload=True)[0]
    assert min(result["freed"]) > 1e6
    assert result["metrics"] == one_rank[algorithm]["metrics"]
    for role, weights in one_rank[algorithm]["weights"].items():
        for name, tensor in weights.items():
            assert np.array_equal(result["weights"][role][name], tensor), name
