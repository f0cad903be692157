"""The same recorded batch gives the same metrics, however it is laid out over ranks and cut into microbatches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.metrics.registry import check
from tests.distributed.gang import Gang
from tests.distributed.tiny_models import tiny_model
from tests.distributed.training_jobs import train_job

pytestmark = pytest.mark.slow

# Everything that has a number of its own: KL and supervised terms, both clips, shaped rewards, weighted samples.
PPO = {
    "name": "ppo",
    "value_clip": 0.2,
    "dual_clip": 3.0,
    "entropy_coef": 0.01,
    "kl": {"coef": 0.1, "estimator": "k3", "apply_to": "loss"},
    "sft": {"coef": 0.1, "positive_weight": 1.0, "negative_weight": 0.5},
    "normalize_rewards": "group",
    "reward_clip": 1.0,
    "weight_samples_by": ["difficulty", "length"],
    "num_minibatches": 2,
}
GRPO = {"name": "grpo", "kl": {"coef": 0.1, "apply_to": "reward"}, "num_minibatches": 2, "num_epochs": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "one rank, small microbatches": (1, {}, 64),
    "one rank, one microbatch": (1, {}, 100_000),
    "tp 2": (2, {"tp_size": 2}, 128),
    "pp 2": (2, {"pp_size": 2}, 100),
    "dp 2": (2, {}, 80),
    "cp 2": (2, {"cp_size": 2}, 128),
}
# The contract of docs/metrics.md: 1e-6, relative to values of size 1 and above.
TOLERANCE = 1e-6
# Small enough that no ratio is above 3: a ratio of 10 turns the rounding of a log-prob, 1e-6, into 1e-5.
LR = 3e-4


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_metrics_do_not_depend_on_the_layout(
    algorithm: dict[str, Any], gang: Callable[[int], Gang], tmp_path: Path
) -> None:
    tiny_model("qwen3", directory=tmp_path)

    def metrics(size: int, sizes: dict[str, Any], budget: int) -> dict[str, float]:
        arguments = {"directory": str(tmp_path), "algorithm": algorithm, "sizes": sizes, "num_steps": 1, "lr": LR}
        results = gang(size).run(train_job, parallel=sizes, max_tokens=budget, **arguments)
        return results[0]["metrics"][0]  # type: ignore[no-any-return]

    expected = metrics(1, {}, 128)
    assert len(expected) > 35
    for name in expected:
        check(name)
    for layout, (size, sizes, budget) in LAYOUTS.items():
        found = metrics(size, sizes, budget)
        assert found.keys() == expected.keys(), layout
        off = {
            name: (value, found[name])
            for name, value in expected.items()
            if abs(found[name] - value) > TOLERANCE * max(1.0, abs(value))
        }
        assert not off, f"{layout}: {off}"
