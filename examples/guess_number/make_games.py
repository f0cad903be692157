"""Writes games.jsonl: how somebody plays who guesses and does not listen."""

from __future__ import annotations

import json
import random
from pathlib import Path

from examples.guess_number.environment import END_OF_GUESS, Game

NUM_GAMES_PER_NUMBER = 40


def main() -> None:
    """Always the same games."""
    draw = random.Random(0)
    rows = [row(draw, hidden) for hidden in range(1, 10) for _ in range(NUM_GAMES_PER_NUMBER)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (Path(__file__).parent / "games.jsonl").write_text(text, encoding="utf-8")


def row(draw: random.Random, hidden: int) -> dict[str, str]:
    """A game as one text: guesses, and what the environment said to them."""
    game, text = Game(hidden, max_guesses=4), ""
    while not game.is_over:
        guess = f"{draw.randint(1, 9)}{END_OF_GUESS}"
        told = game.take(guess)
        text += guess if game.is_over else guess + told
    return {"prompt": "from 1 to 9:", "answer": str(hidden), "demonstration": text}


if __name__ == "__main__":
    main()
