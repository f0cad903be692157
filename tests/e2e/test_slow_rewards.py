"""The watchdog and rewards: many slow ones are no hang, one that never ends is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import INTERRUPTED, QUICKSTART, ledger, train

HANG_SECONDS = 4
# all of a step together take more than twice as long as a hang, each of them a fifth of it
NUM_SAMPLES, SECONDS_EACH = 12, 0.75

# One worker scores everything in order. In the second step it meets a sample that it never finishes; by then rank 0,
# which waits for it, has got on later than rank 1, which waits for rank 0.
REWARD = f"""
import time
num_calls = 0
def slow(prompt, sample):
    global num_calls
    num_calls += 1
    time.sleep({SECONDS_EACH} if num_calls <= {NUM_SAMPLES + 2} else 1000)
    return 1.0
"""


@pytest.mark.slow
def test_slow_rewards_are_progress_and_one_that_hangs_is_found(tmp_path: Path) -> None:
    (tmp_path / "slow_rewards.py").write_text(REWARD)
    assert NUM_SAMPLES * SECONDS_EACH > 2 * HANG_SECONDS
    outcome = train(
        QUICKSTART,
        tmp_path,
        *INTERRUPTED,
        "run.num_steps=2",
        "rollout.prompts_per_step=3",
        f"rollout.group_size={NUM_SAMPLES // 3}",
        'reward="slow_rewards:slow"',
        "scoring.num_workers=1",
        # longer than the watchdog's patience: who raises it has to raise both
        "scoring.timeout_seconds=100",
        f"launch.hang_timeout_seconds={HANG_SECONDS}",
    )
    assert [record["step"] for record in ledger(outcome)] == [1], outcome.stderr
    assert outcome.code == 69, outcome.stderr
    assert "MRL-5301 rank 0 on" in outcome.stderr
    assert f"no rank made progress for {HANG_SECONDS} s; it was in reward/compute_rewards of step 2" in outcome.stderr
    assert "rewards/scorer.py" in (outcome.directory / "logs" / "stacks_rank_0.txt").read_text()
