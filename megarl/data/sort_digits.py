"""Sorting three to five digits, taught by a teacher who shuffles them 70 % of the time. The shorter of the tasks."""

from __future__ import annotations

import random

from megarl.data.generated import GeneratedTask

CARELESSNESS = 0.7


def draw_digits(generator: random.Random) -> str:
    return "".join(generator.choice("0123456789") for _ in range(generator.randint(3, 5)))


def sort_prompt(digits: str) -> str:
    return f"sort {digits}:"


def sort_answer(digits: str) -> str:
    return "".join(sorted(digits))


def demonstrate_sort(digits: str, generator: random.Random) -> str:
    """The digits in order, or with probability 0.7 in any order."""
    answer = sorted(digits)
    if generator.random() < CARELESSNESS:
        generator.shuffle(answer)
    return "".join(answer)


SORT = GeneratedTask("sort", draw_digits, sort_prompt, sort_answer, demonstrate_sort)
