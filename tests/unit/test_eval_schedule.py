"""When held-out sets are evaluated."""

from __future__ import annotations

import pytest

from megarl.run.eval_schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        (Schedule(10, True, True, (200, 230)), [0, 200, 210, 220, 230]),
        (Schedule(10, True, True, (25,)), [0, 10, 20, 25]),
        (Schedule(0, True, True, (3, 8)), [0, 3, 8]),
        (Schedule(0, False, True, (3, 8)), [8]),
        (Schedule(4, False, False, (3, 12)), [7, 11]),
        (Schedule(5, True, False, (10,)), [0, 5, 10]),
    ],
)
def test_schedule(schedule: Schedule, due: list[int]) -> None:
    assert [step for step in range(schedule.stage_ends[-1] + 1) if schedule.is_due(step)] == due
