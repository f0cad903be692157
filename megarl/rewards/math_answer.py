"""1 if the response's final answer equals the row's answer as mathematics, else 0."""

from __future__ import annotations

import re
from fractions import Fraction

from megarl.core.errors import DataError
from megarl.core.sample import Prompt, Sample
from megarl.rewards.final_answer import final_answer, last_words
from megarl.rewards.math_equal import are_equal

_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
# Longer ones are left to the text comparison: as a Fraction they would cost more than they can mean.
_PLAIN_NUMBER = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})", re.ASCII)


def math_answer(prompt: Prompt, sample: Sample, *, last_number: bool = False) -> float:
    r"""Compare the final answer of the response with the answer of the row.

    `final_answer` says what the final answer of a text is; a response without one earns 0. An answer of the row that
    marks nothing is taken whole. Two answers are equal if they are the same text after `plain`, or the same number,
    or if math-verify finds them equal. A percent sign is a unit: 10\% is 10 and not 0.1.
    """
    if prompt.answer is None or not prompt.answer.strip():
        raise DataError(
            "MRL-2180",
            f'reward "math_answer": prompt {prompt.id!r} has no answer to compare with.\n'
            "Give every row an answer (data.answer_key names its key), or use another reward.",
        )
    found = final_answer(last_words(sample), last_number)
    if not found:
        return 0.0
    gold, answer = plain(final_answer(prompt.answer) or prompt.answer), plain(found)
    if not gold or not answer:
        return float(found.strip() == prompt.answer.strip())
    if gold == answer:
        return 1.0
    numbers = _number(gold), _number(answer)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return float(are_equal(gold, answer))


def plain(text: str) -> str:
    """The answer without what does not change it: spaces, dollars, commas in thousands, a final dot, a percent sign."""
    text = " ".join(text.split()).replace("{,}", ",").replace(r"\!", "").replace("\u2212", "-")
    before = None
    while text != before:  # each round takes one layer off
        before = text
        text = text.removesuffix(".").removesuffix("%").removesuffix("\\").strip("* ")
        for left, right in _DELIMITERS:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                text = text[len(left) : -len(right)]
        text = re.sub(r"\A([+-]?)\s*\\?[$\u20ac\u00a3\u00a5]\s*(?=[\d.])", r"\1", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _number(text: str) -> Fraction | None:
    return Fraction(text) if _PLAIN_NUMBER.fullmatch(text) else None
