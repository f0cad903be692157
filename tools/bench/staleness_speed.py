"""What drawing ahead saves: ``python tools/bench/staleness_speed.py [--rounds N]``.

The quickstart's task on one rank and one server of the embedded engine, one thread each, with ``rollout.max_staleness``
0, 1 and 2, in alternation. Prints the median seconds of a step and the ratio to 0. It needs two idle cores: with 0 the
rank and the server take turns, with more they work at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_STEPS = 14
SKIPPED = 4  # until the pipeline is full
OVERRIDES = (
    "run.num_ranks=1",
    f"run.num_steps={NUM_STEPS}",
    "warmup.num_steps=40",
    "eval.sets={}",
    "checkpoint.every=0",
    "generation.num_servers=1",
    "generation.colocated=false",
)


def step_seconds(staleness: int, directory: Path) -> list[float]:
    """The seconds of a run's steps once it draws as far ahead as it may."""
    options = [*OVERRIDES, f"rollout.max_staleness={staleness}", f"run.dir={directory}"]
    command = [sys.executable, "-m", "megarl", "train", "--fresh", "configs/quickstart.yaml", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (directory / "quickstart" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line)["metrics"] for line in lines]
    drawn = [record for record in records if "sample/staleness/max" in record]
    assert max(record["sample/staleness/max"] for record in drawn) == staleness
    return [record["timing_s/step"] for record in drawn[SKIPPED:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    seconds: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for _ in range(rounds):
        for staleness, found in seconds.items():
            with tempfile.TemporaryDirectory() as directory:
                found += step_seconds(staleness, Path(directory))
    base = statistics.median(seconds[0])
    sys.stdout.write("max_staleness  seconds per step (median, min-max)  ratio to 0\n")
    for staleness, found in seconds.items():
        middle = statistics.median(found)
        spread = f"{middle:.3f} ({min(found):.3f}-{max(found):.3f})"
        sys.stdout.write(f"{staleness:<14} {spread:<35} {middle / base:.2f}\n")


if __name__ == "__main__":
    main()
