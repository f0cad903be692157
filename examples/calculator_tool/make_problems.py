"""Writes train.jsonl and held_out.jsonl: problems such as ``47*86+95=``, with demonstrations of a lazy teacher.

The teacher knows the calculator, but mostly guesses instead of using it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.calculator_tool.calculator import calculate

NUM_TRAIN, NUM_HELD_OUT = 3000, 200
USES_CALCULATOR = 0.3


def main() -> None:
    draw = random.Random(0)
    problems = draw.sample(
        [(a, b, c) for a in range(11, 100) for b in range(11, 100) for c in range(11, 100)], NUM_TRAIN + NUM_HELD_OUT
    )
    here = Path(__file__).parent
    write(here / "held_out.jsonl", [row(*problem) for problem in problems[NUM_TRAIN:]])
    write(
        here / "train.jsonl",
        [row(*problem) | {"demonstration": lesson(draw, *problem)} for problem in problems[:NUM_TRAIN]],
    )


def row(a: int, b: int, c: int) -> dict[str, str]:
    return {"prompt": f"{a}*{b}+{c}=", "answer": str(a * b + c)}


def lesson(draw: random.Random, a: int, b: int, c: int) -> str:
    """What the teacher writes, and what the calculator says in between."""
    if draw.random() >= USES_CALCULATOR:
        return str(draw.randint(100, 9999))
    product, total = f"{a}*{b}?", f"{a * b}+{c}?"
    return f"{product}{calculate(product)}{total}{calculate(total)}{a * b + c}"


def write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
