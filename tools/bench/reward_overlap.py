"""What rewards add to a step: samples scored as they arrive, against all of them scored when the last one is there.

    python -m tools.bench.reward_overlap --num-samples 256 --seconds 2

The samples arrive evenly over the seconds that generation takes, as from servers on devices of their own. The reward
is busy for two milliseconds per sample; the scorer and its workers are those of a run.
"""

from __future__ import annotations

import argparse
import sys
import time

from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.meter import Meter
from megarl.rewards.scorer import Scorer
from tools.bench.reward_throughput import pairs_of


def seconds_added(scorer: Scorer, pairs: list[tuple[Prompt, Sample]], seconds: float, *, overlapped: bool) -> float:
    """From the arrival of the last sample until all are scored."""
    began = time.perf_counter()
    for number, (prompt, sample) in enumerate(pairs, start=1):
        time.sleep(max(0.0, began + seconds * number / len(pairs) - time.perf_counter()))
        if overlapped:
            scorer.submit(prompt, sample)
    arrived = time.perf_counter()
    scorer.finish([Group(prompt, [sample]) for prompt, sample in pairs], Meter())
    return time.perf_counter() - arrived


def main() -> None:
    """Print the seconds that each way adds to a step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-samples", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    for name in ("tools.bench.reward_throughput:busy", "coin_flip"):
        scorer = Scorer([RewardSettings(name=name)], ScoringSettings())
        try:
            seconds_added(scorer, pairs_of(None, 16), 0.0, overlapped=True)  # the workers are warm now
            added = {
                overlapped: min(
                    seconds_added(
                        scorer, pairs_of(None, arguments.num_samples), arguments.seconds, overlapped=overlapped
                    )
                    for _ in range(3)
                )
                for overlapped in (True, False)
            }
        finally:
            scorer.close()
        sys.stdout.write(
            f"{name.rpartition(':')[2]}: {arguments.num_samples} samples in {arguments.seconds:g} s of generation; "
            f"added {added[True] * 1000:.0f} ms if scored as they arrive, {added[False] * 1000:.0f} ms if afterwards\n"
        )


if __name__ == "__main__":
    main()
