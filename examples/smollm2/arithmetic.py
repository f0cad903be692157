"""Short sums: the prompts to learn from and to be examined on, and the reward."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.core.sample import Prompt, Sample

LARGEST_ADDEND = 20
NUM_HELD_OUT = 100
# Solved sums tell the model what is asked of it, without a chat: megarl's prompts never hold control tokens.
SHOWN = ((3, 4), (25, 31))
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")

Addends = tuple[int, int]


def right_sum(prompt: Prompt, sample: Sample) -> float:
    """1 if the first number of the response is the answer, else 0. What comes after the number does not count."""
    found = _NUMBER.search(sample.response)
    return float(found is not None and found[0] == prompt.answer)


def split_sums(num_held_out: int, seed: int) -> tuple[list[Addends], list[Addends]]:
    """All ordered pairs of addends from 1 to LARGEST_ADDEND, shuffled: those to train on, those held out.

    No pair is in both lists, and none is a shown one.
    """
    addends = range(1, LARGEST_ADDEND + 1)
    pairs = [(a, b) for a in addends for b in addends if (a, b) not in SHOWN]
    random.Random(seed).shuffle(pairs)
    return pairs[num_held_out:], pairs[:num_held_out]


def prompt_text(a: int, b: int) -> str:
    """The solved sums, and one that is not."""
    return "".join(f"{c} + {d} = {c + d}\n" for c, d in SHOWN) + f"{a} + {b} ="


def row(addends: Addends) -> dict[str, str]:
    """A line of the JSONL file."""
    a, b = addends
    return {"id": f"{a}+{b}", "prompt": prompt_text(a, b), "answer": str(a + b)}


def write_rows(path: Path, sums: Sequence[Addends]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row(addends)) + "\n" for addends in sums), encoding="utf-8")
    sys.stdout.write(f"{path}: {len(sums)} sums\n")


def main() -> None:
    """Write train.jsonl and held_out.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the directory to write to")
    out = parser.parse_args().out
    train, held_out = split_sums(NUM_HELD_OUT, seed=0)
    write_rows(out / "train.jsonl", train)
    write_rows(out / "held_out.jsonl", held_out)


if __name__ == "__main__":
    main()
