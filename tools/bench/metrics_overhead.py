"""What measuring costs: the quickstart with everything on against everything off, alternating.

``python tools/bench/metrics_overhead.py [--rounds 3] [--trackers]``: the seconds from one step's record to the next,
recording included; medians over the steps of all rounds. On: memory and times of every phase on every rank, health
rules, kept samples; with ``--trackers`` also a follower for TensorBoard and one for SwanLab, which take their share of
the two cores. Off: no memory, only the total of a phase, no rules, no step lines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_STEPS = 20
WARMUP = 20
COMMON = (
    f"run.num_steps={NUM_STEPS}",
    f"warmup.num_steps={WARMUP}",
    "eval.every=0",
    "eval.before_training=false",
    "eval.at_end=false",
    "checkpoint.every=0",
)
OFF = ("metrics.memory=off", "metrics.phase_time=total", "alerts.enabled=false", "track_with=[]")
ON = ("rollout.kept_groups=4",)
TRACKERS = ("track_with=[stdout, tensorboard, swanlab]", "tracker_kwargs.swanlab.mode=offline")


def step_seconds(directory: Path, settings: tuple[str, ...]) -> list[float]:
    """Seconds between the records of the steps that generate, without the first of them."""
    command = [sys.executable, "-m", "megarl", "train", "--fresh", "configs/quickstart.yaml", f"run.dir={directory}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *COMMON, *settings], cwd=ROOT, env=environment, check=True, capture_output=True)
    lines = (directory / "quickstart" / "metrics.jsonl").read_text().splitlines()
    times = [record["time"] for record in map(json.loads, lines) if record["step"] > WARMUP]
    return [later - earlier for earlier, later in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trackers", action="store_true")
    options = parser.parse_args()
    on = ON + (TRACKERS if options.trackers else ())
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.rounds):
            for name, settings in (("on", on), ("off", OFF)) if number % 2 == 0 else (("off", OFF), ("on", on)):
                seconds[name] += step_seconds(Path(directory), settings)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"  metrics {name:<4} {1000 * median:8.1f} ms per step, median of {len(seconds[name])}")
    print(f"  ratio        {medians['on'] / medians['off']:8.3f}")


if __name__ == "__main__":
    main()
