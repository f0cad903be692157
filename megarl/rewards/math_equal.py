r"""Equality of two answers by math-verify, with the hostile ones kept out.

math-verify reads plain expressions by evaluating them as Python (``sympy.parse_expr``). LaTeX it parses by a grammar,
and only the numbers in it are evaluated. So everything goes in as LaTeX. What is not written in the letters of
mathematics is not handed over at all, nor what is nested so deep that the grammar needs seconds. What stands for a
number too large to write down is not compared. All these are wrong answers, always: none of the limits is about time,
so what an answer earns does not depend on the machine's load.
"""

from __future__ import annotations

import math
import re
import threading
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException

from megarl.core.errors import DataError
from megarl.core.excerpt import excerpt

MAX_CHARACTERS = 400
MAX_DEPTH = 8
MAX_DIGITS = 10_000.0
# of each of three: reading the gold answer, reading the response's, comparing them
TIMEOUT_SECONDS = 2

_ALPHABET = re.compile(r"[A-Za-z0-9\s\\{}()\[\]|+\-*/^_=<>.,:;!%&$°×÷·√π∞≤≥≠±∪∩∈→]+")
# Dunder names and attributes, which are Python and no mathematics; latex2sympy's ways to call functions of sympy by
# name (a matrix of any size, for one) and to make a symbol of any text; 1E999999999, which is expanded when it is read.
_REFUSED = re.compile(r"__|[A-Za-z_)\]]\s*\.\s*[A-Za-z_]|\\operatorname|\\variable|[\d.]\s*[eE]\s*[+-]?\s*\d{4}")
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]


def are_equal(gold: str, answer: str) -> bool:
    """Whether the answer means what the gold one does. Raises DataError if it cannot be decided in time."""
    if not _is_readable(answer) or not _is_readable(gold):
        return False
    try:
        parsed_gold, parsed_answer = _parse(gold), _parse(answer)
        if parsed_gold is None or parsed_answer is None or not _is_small(parsed_answer) or not _is_small(parsed_gold):
            return False
        return bool(verify(parsed_gold, parsed_answer, timeout_seconds=_timeout()))
    except TimeoutException:
        raise DataError(
            "MRL-2181",
            f'reward "math_answer": comparing {excerpt(answer)} with {excerpt(gold)} took more than '
            f"{TIMEOUT_SECONDS} seconds.",
        ) from None


def _timeout() -> int | None:
    """math-verify's own limit is an alarm, which only the main thread may set."""
    return TIMEOUT_SECONDS if threading.current_thread() is threading.main_thread() else None


def _is_readable(text: str) -> bool:
    if len(text) > MAX_CHARACTERS or not _ALPHABET.fullmatch(text) or _REFUSED.search(text):
        return False
    depth = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        if depth > MAX_DEPTH:
            return False
    return True


@lru_cache(maxsize=256)  # the samples of a group share their gold answer, and often theirs
def _parse(text: str) -> Any:
    found = parse(rf"\boxed{{{text}}}", _LATEX, "no_fallback", "first_match", _timeout(), raise_on_error=True)
    return found[0] if found else None


def _is_small(expression: Any) -> bool:
    try:
        return _num_digits(expression) <= MAX_DIGITS
    except OverflowError:
        return False


def _num_digits(expression: Any) -> float:
    """About how many digits its value has, at most; a symbol counts as one digit, so (x+1)^n has n."""
    if isinstance(expression, sympy.MatrixBase):
        return sum(map(_num_digits, expression))
    if isinstance(expression, sympy.Rational):
        return (abs(int(expression.p)).bit_length() + int(expression.q).bit_length()) * math.log10(2)
    if isinstance(expression, sympy.Float):
        _, _, exponent, num_bits = expression._mpf_
        return float((abs(exponent) + num_bits) * math.log10(2))
    if isinstance(expression, sympy.Pow):
        return max(1.0, _num_digits(expression.base)) * _magnitude(expression.exp)
    if isinstance(expression, sympy.factorial):
        return _magnitude(expression.args[0]) * max(1.0, _num_digits(expression.args[0]))
    if isinstance(expression, (sympy.Sum, sympy.Product)):
        num_terms = math.prod(_magnitude(bound) for limits in expression.limits for bound in limits[1:])
        return _num_digits(expression.function) * max(1.0, num_terms)
    return max(1.0, sum(_num_digits(part) for part in getattr(expression, "args", ())))


def _magnitude(expression: Any) -> float:
    """About how large its value is, at most; a symbol counts as ten."""
    if isinstance(expression, sympy.Number):
        return abs(float(expression))
    return float(10.0 ** _num_digits(expression))
