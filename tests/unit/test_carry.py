"""The generated tasks: what the teacher writes, and that held-out problems are never trained on."""

from __future__ import annotations

import random

import pytest

from megarl.core.errors import ConfigError
from megarl.data.carry import addition_answer, demonstrate_addition, draw_addition
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import open_prompts
from megarl.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("builtin:characters")
ENCODER = PromptEncoder(TOKENIZER)


def test_a_careful_teacher_is_always_right() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        problem = draw_addition(generator)
        demonstration = demonstrate_addition(problem, generator, forgetfulness=0)
        assert demonstration.rpartition(":")[2] == addition_answer(problem)


@pytest.mark.parametrize(
    ("problem", "careful", "forgetful"),
    [
        ((556, 477), "6+7=13 5+7=12+1=13 5+4=9+1=10:1033", "6+7=13 5+7=12 5+4=9:923"),
        ((794, 394), "4+4=8 9+9=18 7+3=10+1=11:1188", "4+4=8 9+9=18 7+3=10:1088"),
        ((12, 34), "2+4=6 1+3=4:46", "2+4=6 1+3=4:46"),
    ],
)
def test_what_a_demonstration_looks_like(problem: tuple[int, int], careful: str, forgetful: str) -> None:
    generator = random.Random(0)
    assert demonstrate_addition(problem, generator, forgetfulness=0) == careful
    assert demonstrate_addition(problem, generator, forgetfulness=1) == forgetful


def test_the_teacher_is_right_as_often_as_the_recipe_says() -> None:
    source = open_prompts("builtin:carry", ENCODER)
    prompts = [source[index] for index in range(4000)]
    right = sum((prompt.demonstration or "").rpartition(":")[2] == prompt.answer for prompt in prompts) / len(prompts)
    # The recipe measured 52 %; four standard errors of 4000 draws are 3.2 points.
    assert right == pytest.approx(0.52, abs=0.032)
    three_digits = sum(len(prompt.text) == 8 for prompt in prompts) / len(prompts)
    # max of two fair coins: 3/4, up to four standard errors (2.7 points) and the held-out part's slight tilt.
    assert three_digits == pytest.approx(0.75, abs=0.035)


@pytest.mark.parametrize("task", ["carry", "sort"])
def test_training_and_held_out_problems_never_meet(task: str) -> None:
    training = open_prompts(f"builtin:{task}", ENCODER)
    held_out = open_prompts(f"builtin:{task}_held_out", ENCODER)
    texts = {held_out[index].text for index in range(len(held_out))}
    assert len(texts) == len(held_out) == 512
    assert len(training) >= 12800
    assert not texts & {training[index].text for index in range(12800)}
    assert all(held_out[index].demonstration is None for index in range(512))


@pytest.mark.parametrize("name", ["builtin:carry", "builtin:carry_held_out", "builtin:sort", "builtin:sort_held_out"])
def test_sources_are_the_same_in_every_run_and_encodable(name: str) -> None:
    first, second = open_prompts(name, ENCODER), open_prompts(name, ENCODER)
    for index in reversed(range(200)):  # in another order than a fresh source would produce them
        prompt, again = first[index], second[index]
        assert (prompt.id, prompt.text, prompt.answer) == (again.id, again.text, again.answer)
        assert prompt.demonstration == again.demonstration
        assert prompt.token_ids.tolist() == TOKENIZER.encode(prompt.text).tolist()
        TOKENIZER.encode(prompt.demonstration or "")
        assert prompt.task == name.removeprefix("builtin:").removesuffix("_held_out")
    with pytest.raises(IndexError):
        first[len(first)]


def test_sort_answers_are_sorted_and_demonstrations_often_are_not() -> None:
    source = open_prompts("builtin:sort", ENCODER)
    prompts = [source[index] for index in range(2000)]
    for prompt in prompts:
        digits = prompt.text.removeprefix("sort ").removesuffix(":")
        assert prompt.answer == "".join(sorted(digits))
        assert 3 <= len(digits) <= 5
        assert sorted(prompt.demonstration or "") == sorted(digits)
    right = sum(prompt.demonstration == prompt.answer for prompt in prompts) / len(prompts)
    # 30 % are sorted on purpose; a shuffle of 3, 4 or 5 digits lands on the sorted order in 1/6, 1/24, 1/120 and, with
    # repeated digits, a little more: 0.3 + 0.7 * 0.072 = 0.35, plus repetitions. Wide bounds, far from 0 and from 1.
    assert 0.3 < right < 0.45


def test_held_out_problems_cannot_be_demonstrated() -> None:
    with pytest.raises(ConfigError, match="has no demonstration"):
        open_prompts("builtin:carry_held_out", ENCODER, required=frozenset({"demonstration"}))
