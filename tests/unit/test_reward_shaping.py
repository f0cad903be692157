"""The rewards "format", "length" and "outcome"."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.core.errors import DataError
from megarl.rewards.conversation_outcome import outcome
from megarl.rewards.format import PRESETS, has_format
from megarl.rewards.length import length
from tests.unit.reward_samples import make_prompt, make_sample

PROMPT = make_prompt()


@pytest.mark.parametrize(
    ("options", "response", "expected"),
    [
        ({"preset": "think_answer"}, "<think>a\nb</think>\n<answer>7</answer>\n", 1),
        ({"preset": "think_answer"}, "<think></think><answer></answer>", 1),
        ({"preset": "think_answer"}, "Hm. <think>a</think><answer>7</answer>", 0),
        ({"preset": "think_answer"}, "<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ({"preset": "think_answer"}, "<think>a<think>b</think></think><answer>7</answer>", 0),
        ({"preset": "think_answer"}, "<answer>7</answer>", 0),
        ({"preset": "think"}, "<think>a</think>\nSeven.", 1),
        ({"preset": "think"}, "<think>a</think>", 0),
        ({"preset": "think"}, "<think>a</think>b</think>c", 0),
        ({"preset": "boxed"}, "so \\boxed{7}.", 1),
        ({"preset": "boxed"}, "so 7", 0),
        ({"preset": "hashes"}, "a\n#### 7\n", 1),
        ({"preset": "hashes"}, "#### 7\nand more", 0),
        ({"pattern": r"\d+"}, "42", 1),
        ({"pattern": r"\d+"}, "42.", 0),
        ({"pattern": r".*\d.*"}, "a\n4\nb", 1),
    ],
)
def test_format(options: dict[str, Any], response: str, expected: float) -> None:
    assert has_format(PROMPT, make_sample(response), **options) == expected


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_take_long_responses_without_backtracking(preset: str) -> None:
    """A quadratic one would need minutes for this."""
    for unit in ("<think>", "</think>", "<answer>", "\\boxed{", "####", "a", " ", "\n"):
        has_format(PROMPT, make_sample("<think>" + unit * 100_000), preset=preset)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0), (60, 0), (61, -0.025), (80, -0.5), (100, -1), (101, -1), (1000, -1)]
)
def test_overlong_shaping(num_tokens: int, expected: float) -> None:
    found = length(PROMPT, make_sample(num_tokens=num_tokens), max_tokens=100, buffer_tokens=40)
    assert found == pytest.approx(expected, abs=1e-12)  # one division


@given(st.integers(1, 500), st.data())
def test_a_longer_response_never_earns_more(max_tokens: int, data: st.DataObject) -> None:
    buffer_tokens = data.draw(st.integers(1, max_tokens))
    shorter, longer = sorted(data.draw(st.lists(st.integers(0, 1000), min_size=2, max_size=2)))
    penalties = [
        length(PROMPT, make_sample(num_tokens=n), max_tokens=max_tokens, buffer_tokens=buffer_tokens)
        for n in (shorter, longer)
    ]
    assert 0 >= penalties[0] >= penalties[1] >= -1


def test_outcome() -> None:
    sample = make_sample()
    with pytest.raises(DataError, match=r"MRL-2183 .*'train.jsonl:3' has no outcome"):
        outcome(PROMPT, sample)
    sample.outcome = 0.25
    assert outcome(PROMPT, sample) == 0.25
