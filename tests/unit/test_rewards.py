"""Rewards: what they may return, and that a failure is told and never becomes a zero."""

from __future__ import annotations

import asyncio
import gc
import math
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
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
from megarl.rewards.score import score_groups


def make_sample(response: str = "", seed: int = 0) -> Sample:
    return Sample(np.zeros(1, np.int64), np.zeros(1, np.int8), np.zeros(1, np.float32), "stop", response, seed=seed)


def make_group(*responses: str, answer: str | None = "42", prompt_id: str = "train.jsonl:3") -> Group:
    prompt = Prompt(prompt_id, "6*7=", np.zeros(1, np.int64), answer)
    return Group(prompt, [make_sample(response, seed) for seed, response in enumerate(responses)])


def score_with(function: Callable[..., Any], *groups: Group, max_concurrency: int = 256, **options: Any) -> None:
    with closing(RewardFunction("mine:score", function, options)) as reward:
        score_groups(groups, reward, max_concurrency)


def score(function: Callable[..., Any], *responses: str) -> list[float | None]:
    group = make_group(*responses)
    score_with(function, group)
    return [sample.reward for sample in group.samples]


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
    group = make_group(response)
    score_groups([group], load_reward("exact_match", {} if after is None else {"after": after}))
    assert group.samples[0].reward == expected


def test_exact_match_needs_an_answer() -> None:
    with pytest.raises(DataError, match=r"MRL-2101 .*'train.jsonl:3' has no answer"):
        score_groups([make_group("42", answer=None)], load_reward("exact_match", {}))


def test_coin_flip_repeats_itself_and_is_fair() -> None:
    reward = load_reward("coin_flip", {})
    first, second = make_group(*["42"] * 1000), make_group(*["41"] * 1000)
    score_groups([first, second], reward)
    flips = [sample.reward for sample in first.samples]
    assert flips == [sample.reward for sample in second.samples], "the response must not matter"
    assert set(flips) == {0.0, 1.0}
    # Fixed seeds, so this cannot flicker; four standard errors of 1000 fair flips are 6.3 points.
    assert np.mean(flips) == pytest.approx(0.5, abs=0.063)


def test_sync_and_async_rewards_and_named_scores() -> None:
    assert score(length_of, "1", "22", "333") == [1.0, 2.0, 3.0]
    first, second = make_group("1", "22"), make_group("333")
    score_with(slow_length_of, first, second)
    assert [sample.reward for sample in [*first.samples, *second.samples]] == [1.0, 2.0, 3.0]
    assert [sample.scores for sample in [*first.samples, *second.samples]] == [{"first": n} for n in (1.0, 2.0, 3.0)]


def test_async_rewards_run_concurrently_up_to_the_limit() -> None:
    running, most = 0, 0

    async def watch(prompt: Prompt, sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(10):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    score_with(watch, make_group(*["x"] * 20), max_concurrency=7)
    assert most == 7


def test_async_rewards_share_one_event_loop_over_the_steps() -> None:
    loops = []

    async def remember(prompt: Prompt, sample: Sample) -> float:
        loops.append(asyncio.get_running_loop())
        return 0.0

    with closing(RewardFunction("mine:remember", remember)) as reward:
        for _ in range(2):
            score_groups([make_group("x")], reward)
    assert loops[0] is loops[1]


def test_a_sync_reward_may_run_its_own_event_loop() -> None:
    async def inner() -> float:
        return 0.5

    assert score(lambda prompt, sample: asyncio.run(inner()), "x") == [0.5]


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

    group = make_group("x")
    function = later if is_async else lambda prompt, sample: value
    with pytest.raises(DataError) as caught:
        score_with(function, group)
    first, second = str(caught.value).splitlines()
    assert first.startswith('MRL-2103 reward "mine:score" returned ')
    assert "'train.jsonl:3'" in first
    assert second.startswith("Expected ")
    assert group.samples[0].reward is None
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

    group = make_group("x", prompt_id="id\n" + "y" * 1000)
    with pytest.raises(DataError) as caught:
        score_with(fail, group)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_a_failure_leaves_no_coroutine_behind() -> None:
    async def fail_first(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0)  # so that the others queue behind the first
        if sample.seed == 0:
            raise ValueError("first")
        return 0.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match="'first'"):
            score_with(fail_first, make_group(*["x"] * 50), max_concurrency=1)
        gc.collect()
    assert not [str(warning.message) for warning in caught if "never awaited" in str(warning.message)]


def test_options_reach_the_function() -> None:
    group = make_group("x")
    score_with(lambda prompt, sample, *, scale: 2.0 * scale, group, scale=3)
    assert group.samples[0].reward == 6.0


def test_own_functions_are_imported() -> None:
    reward = load_reward("megarl.rewards.exact_match:exact_match", {"after": ":"})
    group = make_group("x:42")
    score_groups([group], reward)
    assert group.samples[0].reward == 1.0


def test_unknown_names_and_options_are_config_errors() -> None:
    with pytest.raises(ConfigError, match=r"'exact' is not known. Built in: exact_match, coin_flip"):
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
