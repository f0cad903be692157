"""Scores the answers on standard input by math_answer, and tells what was compiled or started meanwhile. A script."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import sympy.physics.units  # noqa: F401 - sympy loads it late, and makes its symbols by evaluating their names

from megarl.core.errors import MegarlError
from megarl.rewards.math_answer import math_answer
from tests.unit.reward_samples import make_prompt, make_sample

HONEST = [
    (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
    (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
    ("5", r"\boxed{x}", 0.0),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
    ("7", "#### 7", 1.0),
]
# What sympy itself evaluates: its own names, and the numbers of an answer, which its lexer found.
OWN = re.compile(r"from sympy import [*]|Integer [(]\d+ [)]|Float [(]'[\d.Ee+-]+' [)]")
# The names in the functions that it writes for polynomials: nothing of the answer is in them.
POLYNOMIAL = re.compile(r"def|return|if|else|monomial_[a-z]+|None|[ABCRabcrk]\d*")
STARTED = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect")
seen: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "compile":
        source = arguments[0]
        text = source.decode(errors="replace") if isinstance(source, bytes) else str(source)
        words = re.findall(r"\w*[A-Za-z_]\w*", text)
        if not OWN.fullmatch(text) and not all(POLYNOMIAL.fullmatch(word) for word in words):
            seen.append(text)
    elif event in STARTED:
        seen.append(event)


def score(gold: str, response: str) -> float | str:
    try:
        return math_answer(make_prompt(gold), make_sample(response))
    except MegarlError as error:
        return error.code


def check_honest(after: str) -> None:
    found = [score(gold, response) for gold, response, _ in HONEST]
    assert found == [expected for *_, expected in HONEST], after


def main() -> None:
    check_honest("the start")
    sys.addaudithook(watch)
    rewards = []
    for answer in json.load(sys.stdin):
        rewards.append([score("5", form % answer) for form in ("#### %s", r"\boxed{%s}", "<answer>%s</answer>")])
        check_honest(answer)
    exec("open")  # so that the test sees that the hook sees
    json.dump({"rewards": rewards, "seen": seen}, sys.stdout)


if __name__ == "__main__":
    main()
