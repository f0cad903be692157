"""The steps of a run as a small table: mean reward, accuracy on the held-out set, seconds."""

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


def table(lines: list[str], held_out: str = "held_out") -> str:
    """One row per line of ``metrics.jsonl``; a dash where a step has no such number."""
    rows = [["step", *COLUMNS]]
    keys = [key.replace("held_out", held_out) for key in COLUMNS.values()]
    for line in lines:
        record = json.loads(line)
        numbers = [record["metrics"].get(key) for key in keys]
        rows.append([str(record["step"]), *("-" if number is None else f"{number:.3g}" for number in numbers)])
    return "".join("  ".join(cell.rjust(13) for cell in row).rstrip() + "\n" for row in rows)


def main() -> None:
    """Read the ledger of a run directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--held-out", default="held_out", help="the name of the evaluation set")
    arguments = parser.parse_args()
    ledger = arguments.run / "metrics.jsonl"
    sys.stdout.write(table(ledger.read_text(encoding="utf-8").splitlines(), arguments.held_out))


if __name__ == "__main__":
    main()
