"""Column addition, taught by a teacher who forgets to carry.

``556+477=`` is answered column by column from the right, with the sum after a colon::

    6+7=13 5+7=12+1=13 5+4=9+1=10:1033

The demonstrations forget 70 % of the carries. A model that imitates them perfectly adds wrongly about half of the time,
in a way that a person can see; reinforcement learning has to find the forgotten carries from the reward alone.
"""

from __future__ import annotations

import random

from megarl.data.generated import GeneratedTask

FORGETFULNESS = 0.7

Addition = tuple[int, int]


def draw_addition(generator: random.Random) -> Addition:
    """Two operands of equal length: two digits, or (three times out of four) three."""
    num_digits = max(generator.randint(2, 3), generator.randint(2, 3))
    low, high = 10 ** (num_digits - 1), 10**num_digits - 1
    return generator.randint(low, high), generator.randint(low, high)


def addition_prompt(problem: Addition) -> str:
    return f"{problem[0]}+{problem[1]}="


def addition_answer(problem: Addition) -> str:
    return str(problem[0] + problem[1])


def demonstrate_addition(problem: Addition, generator: random.Random, forgetfulness: float = FORGETFULNESS) -> str:
    """Add column by column from the right, forgetting each carry with probability ``forgetfulness``."""
    columns, digits, carry = [], [], 0
    for upper, lower in zip(reversed(str(problem[0])), reversed(str(problem[1])), strict=True):
        plain = int(upper) + int(lower)
        remembered = bool(carry) and generator.random() >= forgetfulness
        total = plain + remembered
        columns.append(f"{upper}+{lower}={plain}" + (f"+1={total}" if remembered else ""))
        digits.append(str(total % 10))
        carry = total // 10
    if carry:
        digits.append("1")
    return " ".join(columns) + ":" + "".join(reversed(digits))


CARRY = GeneratedTask("carry", draw_addition, addition_prompt, addition_answer, demonstrate_addition)
