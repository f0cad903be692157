"""Three epochs over 101 rows in batches of 8, with ten kills on the way: every row exactly once per epoch?

    python tools/kill_epochs.py --kills 10

Every kill is a SIGKILL that the process gets at a random point of a random step: while it rolls out, trains, records,
or in the middle of a save. Which rows were trained on is read from the run's own recordings.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e.epochs import NUM_ROWS, epochs_drawn, kills, train_with_kills, write_rows  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    faults = kills(arguments.kills, arguments.seed)
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        ids = write_rows(directory / "rows.jsonl")
        print(f"kills: {', '.join(faults)}", flush=True)
        num_killed = train_with_kills(directory, faults)
        epochs = epochs_drawn(directory)
    exact = [epoch == dict.fromkeys(ids, 1) for epoch in epochs]
    for number, epoch in enumerate(epochs, start=1):
        counts = f"{min(epoch.values())} to {max(epoch.values())}"
        print(f"epoch {number}: {len(epoch)} of {NUM_ROWS} rows, drawn {counts} times")
    print(f"{num_killed} kills; every row exactly once per epoch: {all(exact)}")
    return 0 if all(exact) and num_killed == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
