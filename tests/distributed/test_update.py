"""Non-finite numbers: the optimizer step is skipped everywhere at once, says why, and gives up after three in a row."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.tiny_models import tiny_model
from tests.distributed.training_jobs import recorded_groups

PLANTED_SAMPLE = 9
LAYOUTS = {"dp2": (1, 1), "pp2": (1, 2), "tp2": (2, 1)}


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("qwen3", tied=True, directory=directory)
    return directory


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _policy(world: Any, directory: str) -> Any:
    from megarl.models.optim import OptimizerSettings, TrainingOptions
    from megarl.models.policy import Policy
    from tests.distributed.builders import language_model

    settings = OptimizerSettings(lr=1e-3, num_updates=100, schedule="linear", min_lr_ratio=0.0)
    return Policy(language_model(world, directory), settings, TrainingOptions(), 1.0)


def _batch(world: Any, policy: Any, algorithm: Any, *, masked: bool = False) -> Any:
    from megarl.data.distribute import distribute
    from megarl.data.pack import pack
    from megarl.data.plan import PackPlan
    from megarl.metrics.meter import Meter

    groups = recorded_groups() if world.is_driver else []
    for group in groups:
        for sample in group.samples:
            sample.loss_mask[:] *= not masked
    algorithm.credit_groups(groups, Meter())
    batch = distribute(pack(groups, PackPlan(world.dp.size, 1, 200)) if world.is_driver else None, world)
    return algorithm.credit_tokens(policy.annotate(batch), world, Meter())


def _plant(batch: Any, value: float) -> bool:
    """Put ``value`` into one token's advantage of one sample; False if another rank holds the sample."""
    for micro in batch.microbatches():
        if PLANTED_SAMPLE in micro.sample_index.tolist():
            own = micro.loss_mask.bool() & (micro.sample_index[micro.sequence_of_token] == PLANTED_SAMPLE)
            micro.advantages[own.nonzero()[-1]] = value
            return True
    return False


def skip_job(world: Any, directory: str) -> dict[str, Any]:
    """bad, good, bad, bad, bad: the last one is the third in a row."""
    from megarl.algorithms.grpo import Grpo
    from megarl.config.algorithms import GrpoSettings
    from megarl.core.checksum import combine, tensor_checksum
    from megarl.core.errors import DataError
    from megarl.metrics.reduce import reduce_to_driver
    from megarl.models.update import logger

    def weights() -> int:
        return combine(tensor_checksum(name, p) for name, p in policy.model.chunks[0].named_parameters())

    listener = _Listener()
    logger.addHandler(listener)
    algorithm = Grpo(GrpoSettings(name="grpo"))
    policy = _policy(world, directory)
    checksums, records, planted, error = [weights()], [], False, None
    for value in (float("nan"), 0.0, float("inf"), float("nan"), float("nan")):
        batch = _batch(world, policy, algorithm)
        planted |= bool(value) and _plant(batch, value)
        try:
            records.append(reduce_to_driver(policy.update(batch, algorithm), world))
        except DataError as caught:
            error = caught.code
        checksums.append(weights())
    logger.removeHandler(listener)
    return {
        "weights": checksums, "records": records, "planted": planted, "error": error, "messages": listener.messages,
    }  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_non_finite_number_skips_the_step_on_all_ranks(layout: str, gang: Any, model_directory: Path) -> None:
    tp_size, pp_size = LAYOUTS[layout]
    results = gang(2).run(skip_job, tp_size, pp_size, directory=str(model_directory))
    for result in results:
        start, after_nan, after_good, *after_bad = result["weights"]
        assert after_nan == start, "a skipped step must not change a bit"
        assert after_good != start, "a good step must train"
        assert after_bad == [after_good] * 3
        assert result["error"] == "MRL-3002", "every rank must give up, or the others wait forever"
    if layout == "dp2":
        assert sorted(result["planted"] for result in results) == [False, True], "the number is on one rank only"
    driver, other = results
    assert other["messages"] == [], "one voice"
    assert len(driver["messages"]) == 4
    for message in driver["messages"]:
        assert message.startswith("MRL-3001 actor: gradient norm is ")
        assert f"non-finite loss: {PLANTED_SAMPLE}." in message
    assert [record["actor/skipped_updates"] for record in driver["records"]] == [1, 0, 1, 1]
    bad, good = driver["records"][:2]
    assert bad.keys() == {"actor/skipped_updates", "actor/lr"}, "numbers of a skipped step would be NaN"
    assert good["actor/lr"] == bad["actor/lr"] == pytest.approx(1e-3), "a skipped step does not move the schedule"
    assert driver["records"][2]["actor/lr"] < 1e-3


def masked_job(world: Any, directory: str) -> dict[str, Any]:
    from megarl.algorithms.grpo import Grpo
    from megarl.config.algorithms import GrpoSettings
    from megarl.metrics.reduce import reduce_to_driver

    algorithm = Grpo(GrpoSettings(name="grpo", entropy_coef=0.1, dual_clip=3.0))
    policy = _policy(world, directory)
    before = {name: p.detach().clone() for name, p in policy.model.chunks[0].named_parameters()}
    record = reduce_to_driver(policy.update(_batch(world, policy, algorithm, masked=True), algorithm), world)
    unmoved = all(torch.equal(p, before[name]) for name, p in policy.model.chunks[0].named_parameters())
    return {"record": record, "unmoved": unmoved}


def test_an_all_masked_batch_is_a_finite_step_of_zero(gang: Any, model_directory: Path) -> None:
    driver, other = gang(2).run(masked_job, directory=str(model_directory))
    assert driver["record"] == {
        "actor/pg_loss": 0.0,
        "actor/weighted_pg_loss": 0.0,
        "actor/total_loss": 0.0,
        "actor/total_samples": 24.0,
        "actor/valid_samples": 0.0,
        "actor/grad_norm": 0.0,
        "actor/grad_norm_max": 0.0,
        "actor/skipped_updates": 0.0,
        "actor/lr": 1e-3,
    }
    assert driver["unmoved"]
    assert other["unmoved"]
