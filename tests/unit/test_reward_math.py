"""math_answer: what it takes for the final answer, and when two answers are equal."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import DataError
from megarl.core.sample import Turn
from megarl.rewards.final_answer import final_answer
from megarl.rewards.math_answer import math_answer, plain
from tests.unit.reward_samples import make_prompt, make_sample


def score(gold: str, response: str, last_number: bool = False) -> float:
    return math_answer(make_prompt(gold), make_sample(response), last_number=last_number)


GSM8K = [
    ("18", "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", 1),
    ("#### 18", "#### 18", 1),
    ("Long way.\n#### 70,000", "#### 70000", 1),
    ("70000", "#### 70,000", 1),
    ("70000", "#### $70,000.", 1),
    ("70000", "#### $70,000.00", 1),
    ("5", "#### 5.", 1),
    ("5", "#### 5.0", 1),
    ("5", "####5", 1),
    ("5", "#### **5**", 1),
    ("10", "#### 10%", 1),
    ("10%", "#### 10", 1),
    ("0.5", "#### 1/2", 1),
    ("-3", "#### -3", 1),
    ("-3", "#### \u22123", 1),
    ("-20", "#### -$20", 1),
    ("3", "It is 3.", 0),
    ("3", "#### 4\nIt is 3.", 0),
    ("3", "#### 3\n#### 4", 0),
    ("4", "#### 3\n#### 4", 1),
    ("3", "3 #### ", 0),
    ("3", "", 0),
    ("3", "#### three", 0),
    ("1234", "#### 1,23,4", 0),
    ("12", "#### 1,2", 0),
    ("0.1", "#### 10%", 0),
    ("18", "#### 18 eggs and 17 more", 0),
    ("18", "#### 81", 0),
    ("1000000000000000000001", "#### 1000000000000000000002", 0),
    ("3.14", "#### 3.1400", 1),
    ("3.14", "#### 3.14001", 0),
]
MATH = [
    (r"\frac{1}{2}", r"so $\boxed{\frac{1}{2}}$.", 1),
    (r"\frac{1}{2}", r"\boxed{0.5}", 1),
    (r"\frac{1}{2}", r"\boxed{\dfrac12}", 1),
    (r"\frac{1}{2}", r"\boxed{1/2}", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{2}{4}}", 1),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0),
    (r"The proof: $\boxed{\frac{1}{2}}$", r"\boxed{\frac12}", 1),
    (r"3\sqrt{13}", r"\boxed{3\sqrt{13}}", 1),
    (r"3\sqrt{13}", r"\boxed{\sqrt{117}}", 1),
    (r"3\sqrt{13}", r"\boxed{3\sqrt{14}}", 0),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(3,\frac{\pi}{2})}", 1),
    (r"\left( 3, \frac{\pi}{2} \right)", r"\boxed{(\frac{\pi}{2},3)}", 0),
    ("(1,2)", r"\boxed{(1, 2)}", 1),
    ("(1,2)", r"\boxed{\left(1,2\right)}", 1),
    ("(1,2)", r"\boxed{[1,2]}", 0),
    (r"x^2+2x+1", r"\boxed{(x+1)^2}", 1),
    (r"x^2+2x+1", r"\boxed{(x+2)^2}", 0),
    ("5", r"\boxed{x=5}", 1),
    ("x=5", r"\boxed{5}", 1),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", 1),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", 1),
    (r"\text{Evelyn}", r"\boxed{\text{Angela}}", 0),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}}", 1),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}", 0),
    ("1,2,3", r"\boxed{3, 2, 1}", 1),
    ("1,2,3", r"\boxed{1, 2}", 0),
    (r"120^\circ", r"\boxed{120}", 1),
    (r"5", r"\boxed{5\text{ cm}}", 1),
    (r"10\%", r"\boxed{10}", 1),
    (r"(-\infty,2)\cup(3,\infty)", r"\boxed{(-\infty, 2) \cup (3, \infty)}", 1),
    (r"(-\infty,2)\cup(3,\infty)", r"\boxed{(-\infty, 2) \cup (4, \infty)}", 0),
    ("7", r"\boxed{6} no, \boxed{7}", 1),
    ("6", r"\boxed{6} no, \boxed{7}", 0),
    ("7", r"\boxed{7} and then \boxed{8", 1),
    ("7", r"\boxed{\boxed{7}}", 1),
    ("7", r"$7$", 0),
    ("2^{10}", r"\boxed{1024}", 1),
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt{3}}}", 1),
    (r"2\pi", r"\boxed{6.283185307179586}", 1),
    ("1+2i", r"\boxed{2i+1}", 1),
    ("1+2i", r"\boxed{1-2i}", 0),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1),
]
TAGGED = [
    ("6", r"<think>\boxed{5}</think><answer>6</answer>", 1),
    ("5", r"<think>\boxed{5}</think><answer>6</answer>", 0),
    ("6", r"<answer>It is \boxed{6}</answer>", 1),
    ("6", "<answer>\n#### 6\n</answer>", 1),
    ("6", "<answer>5</answer> no: <answer> 6 </answer>", 1),
    ("6", "<answer>6", 0),
]


@pytest.mark.parametrize(("gold", "response", "expected"), [*GSM8K, *MATH, *TAGGED])
def test_answers(gold: str, response: str, expected: float) -> None:
    assert score(gold, response) == expected


def test_the_corpus_is_large_enough() -> None:
    assert len(GSM8K) + len(MATH) + len(TAGGED) >= 60


@pytest.mark.parametrize(
    ("response", "expected"),
    [("It is 3 and then 42.", 1), ("42 and then 3", 0), ("#### 3 or 42", 0), ("none", 0), ("1,042, 42,", 1)],
)
def test_the_last_number_counts_if_asked_for_and_nothing_is_marked(response: str, expected: float) -> None:
    assert score("42", response, last_number=True) == expected
    assert score("42", response) == 0


def test_a_tool_cannot_answer_for_the_policy() -> None:
    sample = make_sample(r"Let me see. Tool: \boxed{42}")
    sample.turns = (Turn("policy", "Let me see.", 3), Turn("environment", r"Tool: \boxed{42}", 3))
    assert math_answer(make_prompt("42"), sample) == 0
    sample.turns = (*sample.turns, Turn("policy", r"So \boxed{42}", 3))
    assert math_answer(make_prompt("42"), sample) == 1


@pytest.mark.parametrize("answer", [None, "", "  "])
def test_a_row_without_an_answer_is_told(answer: str | None) -> None:
    with pytest.raises(DataError, match=r"MRL-2180 .*'train.jsonl:3' has no answer"):
        math_answer(make_prompt(answer), make_sample("#### 1"))


def test_it_works_in_a_thread() -> None:
    """math-verify's own time-out cannot be set there."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score(r"\frac{3}{7}", r"\boxed{\frac{6}{14}}")))
    thread.start()
    thread.join()
    assert found == [1.0]


@given(st.integers(-(10**12), 10**12), st.sampled_from(["#### {}", r"\boxed{{{}}}", "<answer>{}</answer>", "$#### {}"]))
def test_an_integer_equals_itself_with_commas_and_no_other(number: int, form: str) -> None:
    response = form.format(f"{number:,}")
    assert score(str(number), response) == 1
    assert score(str(number + 1), response) == 0


@given(st.text(max_size=200))
def test_extraction_and_normalisation_take_any_text(text: str) -> None:
    found = final_answer(text + r"\boxed{7}", last_number=True)
    assert found is not None
    assert plain(plain(text)) == plain(text), "normalised once and for all"
