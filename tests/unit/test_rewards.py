"""Rewards: what they may return, and that a failure is told and never becomes a zero."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from megarl.core.errors import ConfigError, DataError
from megarl.core.sample import Group, Prompt, Sample
from megarl.rewards import Reward
from megarl.rewards.load import check_reward, load_reward
from megarl.rewards.reward import RewardFunction
from megarl.rewards.score import score as score_one


def make_sample(response: str = "", seed: int = 0) -> Sample:
    return Sample(np.zeros(1, np.int64), np.zeros(1, np.int8), np.zeros(1, np.float32), "stop", response, seed=seed)


def make_group(*responses: str, answer: str | None = "42", prompt_id: str = "train.jsonl:3") -> Group:
    prompt = Prompt(prompt_id, "6*7=", np.zeros(1, np.int64), answer)
    return Group(prompt, [make_sample(response, seed) for seed, response in enumerate(responses)])


def score_with(reward: RewardFunction, group: Group) -> list[Reward]:
    """Score the samples in this process, one after the other."""

    async def score_all() -> list[Reward]:
        return [await score_one(reward, group.prompt, sample) for sample in group.samples]

    return asyncio.run(score_all())


def score(function: Callable[..., Any], *responses: str) -> list[float]:
    return [reward.value for reward in score_with(RewardFunction("mine:score", function), make_group(*responses))]


def length_of(prompt: Prompt, sample: Sample) -> float:
    return len(sample.response)


async def slow_length_of(prompt: Prompt, sample: Sample) -> Reward:
    await asyncio.sleep(0)
    return Reward(len(sample.response), {"first": float(sample.response[0])})


@pytest.mark.parametrize(
    ("after", "response", "expected"),
    [
        (None, "42", 1.0),
        (None, " 42", 0.0),
        (None, "", 0.0),
        (":", "6*7=42:42", 1.0),
        (":", "41:42:43", 0.0),
        (":", "42", 0.0),
        (":", "x:", 0.0),
        ("####", "so #### 41 #### no ####42", 1.0),
    ],
)
def test_exact_match(after: str | None, response: str, expected: float) -> None:
    reward = load_reward("exact_match", {} if after is None else {"after": after})
    assert score_with(reward, make_group(response)) == [Reward(expected)]


def test_exact_match_needs_an_answer() -> None:
    with pytest.raises(DataError, match=r"MRL-2101 .*'train.jsonl:3' has no answer"):
        score_with(load_reward("exact_match", {}), make_group("42", answer=None))


def test_coin_flip_repeats_itself_and_is_fair() -> None:
    reward = load_reward("coin_flip", {})
    flips = [one.value for one in score_with(reward, make_group(*["42"] * 1000))]
    others = [one.value for one in score_with(reward, make_group(*["41"] * 1000))]
    assert flips == others, "the response must not matter"
    assert set(flips) == {0.0, 1.0}
    # Fixed seeds, so this cannot flicker; four standard errors of 1000 fair flips are 6.3 points.
    assert np.mean(flips) == pytest.approx(0.5, abs=0.063)


def test_sync_and_async_rewards_and_named_scores() -> None:
    assert score(length_of, "1", "22", "333") == [1.0, 2.0, 3.0]
    assert score_with(RewardFunction("mine:score", slow_length_of), make_group("1", "22")) == [
        Reward(1.0, {"first": 1.0}),
        Reward(2.0, {"first": 2.0}),
    ]


@pytest.mark.parametrize("number", [1, -0.5, np.float32(0.25), np.int64(3), Fraction(1, 2)])
def test_real_numbers_are_accepted(number: Any) -> None:
    assert score(lambda prompt, sample: number, "x") == [float(number)]


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        10**400,
        None,
        "1.0",
        True,
        np.bool_(True),
        [1.0],
        1j,
        torch.tensor(1.0),
        np.array(1.0),
        (1.0, {}),
        {"value": 1.0},
        Reward(math.nan),
        Reward(True),
        Reward(1.0, {"a": math.nan}),
        Reward(1.0, {"a": "high"}),
        Reward(1.0, {1: 1.0}),  # type: ignore[dict-item]
        Reward(1.0, None),  # type: ignore[arg-type]
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_async", [False, True])
def test_anything_else_is_an_error_that_says_what_came(value: Any, is_async: bool) -> None:
    async def later(prompt: Prompt, sample: Sample) -> Any:
        return value

    with pytest.raises(DataError) as caught:
        score(later if is_async else lambda prompt, sample: value, "x")
    first, second = str(caught.value).splitlines()
    assert first.startswith('MRL-2103 reward "mine:score" returned ')
    assert "'train.jsonl:3'" in first
    assert second.startswith("Expected ")
    assert caught.value.exit_code == 65


def test_an_exception_is_told_in_one_line_with_its_place() -> None:
    def divide(prompt: Prompt, sample: Sample) -> float:
        return 1 / len(sample.response)

    async def divide_later(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0)
        return divide(prompt, sample)

    line = divide.__code__.co_firstlineno + 1
    for function in (divide, divide_later):
        with pytest.raises(DataError) as caught:
            score(function, "1", "", "333")
        assert str(caught.value) == (
            "MRL-2102 reward \"mine:score\" raised ZeroDivisionError: 'division by zero' "
            f"(test_rewards.py:{line}) for prompt 'train.jsonl:3'."
        )


def test_the_place_is_in_the_users_file_even_if_a_library_raised() -> None:
    def parse(prompt: Prompt, sample: Sample) -> float:
        return Fraction("no number")  # type: ignore[return-value]

    with pytest.raises(DataError, match=rf"ValueError: .*\(test_rewards.py:{parse.__code__.co_firstlineno + 1}\)"):
        score(parse, "x")


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_cannot_end_the_program_silently(is_async: bool) -> None:
    async def leave_later(prompt: Prompt, sample: Sample) -> float:
        sys.exit(0)

    with pytest.raises(DataError, match="raised SystemExit"):
        score(leave_later if is_async else lambda prompt, sample: sys.exit(0), "x")


def test_foreign_text_in_messages_is_short_and_escaped() -> None:
    def fail(prompt: Prompt, sample: Sample) -> float:
        raise ValueError("\x1b[31mred\nMRL-0000 forged " + "x" * 1000)

    with pytest.raises(DataError) as caught:
        score_with(RewardFunction("mine:score", fail), make_group("x", prompt_id="id\n" + "y" * 1000))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_options_reach_the_function() -> None:
    reward = RewardFunction("mine:score", lambda prompt, sample, *, scale: 2.0 * scale, {"scale": 3})
    assert score_with(reward, make_group("x")) == [Reward(6.0)]


def test_own_functions_are_imported() -> None:
    reward = load_reward("megarl.rewards.exact_match:exact_match", {"after": ":"})
    assert score_with(reward, make_group("x:42")) == [Reward(1.0)]


def test_unknown_names_and_options_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"'exact' is not known. Built in: exact_match, math_answer, "):
        load_reward("exact", {})
    with pytest.raises(ConfigError, match="MRL-1303"):
        load_reward("math:no_such_function", {})
    with pytest.raises(ConfigError, match="unexpected keyword argument 'befor'"):
        load_reward("exact_match", {"befor": ":"})


@pytest.mark.parametrize(
    "function", [lambda: 0.0, lambda prompt: 0.0, lambda a, b, c: 0.0, lambda prompt, *, sample: 0.0, lambda *, a: 0.0]
)
def test_a_function_that_cannot_be_called_is_found_before_training(function: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"Expected call: reward\(prompt, sample\) -> number or Reward"):
        check_reward(RewardFunction("mine:score", function))


@pytest.mark.parametrize(
    "function", [lambda p, s: 0.0, lambda *args: 0.0, lambda p, s, scale=1: 0.0, slow_length_of, lambda p, s, **k: 0.0]
)
def test_functions_that_can_be_called_pass(function: Callable[..., Any]) -> None:
    check_reward(RewardFunction("mine:score", function))
