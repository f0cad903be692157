"""The steps of a run as a small table: mean reward, accuracy on the held-out sums, seconds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

COLUMNS = {
    "mean reward": "critic/score/mean",
    "held out": "eval/held_out/score/mean@1",
    "log-prob gap": "mismatch/logprob_gap_max",
    "gradient norm": "actor/grad_norm",
    "seconds": "timing_s/step",
}


def table(lines: list[str]) -> str:
    """One row per line of ``metrics.jsonl``; a dash where a step has no such number."""
    rows = [["step", *COLUMNS]]
    for line in lines:
        record = json.loads(line)
        numbers = [record["metrics"].get(key) for key in COLUMNS.values()]
        rows.append([str(record["step"]), *("-" if number is None else f"{number:.3g}" for number in numbers)])
    return "".join("  ".join(cell.rjust(13) for cell in row).rstrip() + "\n" for row in rows)


def main() -> None:
    """Read the ledger of a run directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    ledger = parser.parse_args().run / "metrics.jsonl"
    sys.stdout.write(table(ledger.read_text(encoding="utf-8").splitlines()))


if __name__ == "__main__":
    main()
