"""Writes train.jsonl and held_out.jsonl: problems such as ``47*86=``, with demonstrations of a lazy teacher.

The teacher knows the calculator but mostly guesses. A demonstration is one text: the call, what the calculator says,
and the answer.
"""

from __future__ import annotations

import json
import random
from itertools import product
from pathlib import Path

from examples.calculator_tool.calculator import calculate

NUM_TRAIN, NUM_HELD_OUT = 2000, 200
SHARE_OF_CALLS = 0.25


def main() -> None:
    """Draw different problems, always the same ones."""
    draw = random.Random(0)
    problems = draw.sample(list(product(range(11, 100), repeat=2)), NUM_TRAIN + NUM_HELD_OUT)
    here = Path(__file__).parent
    write(here / "train.jsonl", [row(a, b) | {"demonstration": lesson(draw, a, b)} for a, b in problems[:NUM_TRAIN]])
    write(here / "held_out.jsonl", [row(a, b) for a, b in problems[NUM_TRAIN:]])


def row(a: int, b: int) -> dict[str, str]:
    """A problem and its answer."""
    return {"prompt": f"{a}*{b}=", "answer": str(a * b)}


def lesson(draw: random.Random, a: int, b: int) -> str:
    """What the teacher writes."""
    if draw.random() < SHARE_OF_CALLS:
        call = f"{a}*{b}?"
        return f"{call}{calculate(call)}{a * b}"
    return str(draw.randint(121, 9801))


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """One row per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
