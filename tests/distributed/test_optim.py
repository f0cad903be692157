"""The learning-rate schedule. (It lives in a module that imports Megatron, so a rank evaluates it.)"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

Rates = Callable[..., list[float]]


def rates_job(world: Any, settings: dict[str, Any], num_rates: int) -> list[float]:
    from megarl.models.optim import OptimizerSettings, learning_rate

    return [learning_rate(OptimizerSettings(**settings), update) for update in range(num_rates)]


@pytest.fixture
def rates(gang: Any) -> Rates:
    def evaluate(num_rates: int | None = None, **settings: Any) -> list[float]:
        settings = {"lr": 2.0, "num_updates": 10, **settings}
        return gang(1).run(rates_job, settings=settings, num_rates=num_rates or settings["num_updates"])[0]

    return evaluate


def test_constant(rates: Rates) -> None:
    assert rates(min_lr_ratio=0.1) == [2.0] * 10


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_reaches_the_rate_with_its_last_update(schedule: str, rates: Rates) -> None:
    result = rates(schedule=schedule, warmup_updates=4, min_lr_ratio=0.0)
    assert result[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])


def test_linear_ends_at_the_smallest_rate(rates: Rates) -> None:
    assert rates(schedule="linear", min_lr_ratio=0.1, num_updates=5) == pytest.approx([2.0, 1.55, 1.1, 0.65, 0.2])
    assert rates(schedule="linear", min_lr_ratio=0.0, warmup_updates=5)[5:] == pytest.approx([2.0, 1.5, 1.0, 0.5, 0.0])


def test_cosine(rates: Rates) -> None:
    result = rates(schedule="cosine", min_lr_ratio=0.5, num_updates=5)
    assert result == pytest.approx([2.0, 1.5 + 0.5**1.5, 1.5, 1.5 - 0.5**1.5, 1.0])


def test_wsd_holds_the_first_half(rates: Rates) -> None:
    assert rates(schedule="wsd", min_lr_ratio=0.0, num_updates=10) == pytest.approx([2.0] * 6 + [1.5, 1.0, 0.5, 0.0])


def test_wsd_after_a_long_warm_up_does_not_jump(rates: Rates) -> None:
    result = rates(schedule="wsd", min_lr_ratio=0.0, num_updates=10, warmup_updates=7)
    assert result[6:] == pytest.approx([2.0, 2.0, 1.0, 0.0])


@pytest.mark.parametrize("warmup_updates", [0, 3, 9, 10, 30])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_every_rate_is_between_the_limits(schedule: str, warmup_updates: int, rates: Rates) -> None:
    result = rates(40, schedule=schedule, warmup_updates=warmup_updates, min_lr_ratio=0.25)
    assert all(0 < rate <= 2.0 for rate in result)
    after = result[max(0, warmup_updates - 1) :]
    assert all(later <= earlier for earlier, later in pairwise(after)), "only warm-up goes up"
    assert min(after) >= 0.5
    if warmup_updates < 9:
        assert result[-1] == (2.0 if schedule == "constant" else 0.5), "past the end the last rate is kept"


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_a_run_of_one_update(schedule: str, rates: Rates) -> None:
    assert rates(schedule=schedule, num_updates=1, min_lr_ratio=0.0) == [2.0]
