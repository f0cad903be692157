"""Built-in rewards together, weighted, in the worker processes and the driver that they run in."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest

from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.sample import Group, Sample
from megarl.rewards.scorer import Scorer
from tests.unit.reward_samples import make_prompt, make_sample


def score(rewards: Sequence[RewardSettings], group: Group) -> list[Sample]:
    settings = ScoringSettings(num_workers=1, max_failed_fraction=1.0)
    with closing(Scorer(rewards, settings)) as scorer:
        scorer.finish_all([group])
    return group.samples


def test_several_rewards_of_a_math_answer() -> None:
    rewards = [
        RewardSettings(name="math_answer"),
        RewardSettings(name="format", weight=0.5, options={"preset": "think_answer"}),
        RewardSettings(name="length", label="brevity", options={"max_tokens": 10, "buffer_tokens": 10}),
    ]
    good = make_sample(r"<think>a</think><answer>\boxed{\frac{2}{4}}</answer>", num_tokens=5)
    bad = make_sample("one half", num_tokens=20)
    samples = score(rewards, Group(make_prompt("1/2"), [good, bad]))
    assert [sample.failure for sample in samples] == ["", ""]
    assert samples[0].scores == {"math_answer": 1.0, "format": 1.0, "brevity": -0.5}
    assert [sample.reward for sample in samples] == [1.0, -1.0]


def test_an_answer_that_cannot_be_compared_in_time_fails_alone() -> None:
    """math-verify computes this binomial while it reads it."""
    responses = [r"\boxed{\binom{1000000000}{500000000}}", r"\boxed{\frac{10}{2}}", r"\boxed{6}"]
    samples = score([RewardSettings(name="math_answer")], Group(make_prompt("5"), [make_sample(r) for r in responses]))
    assert [sample.reward for sample in samples] == [None, 1.0, 0.0]
    assert "took more than 2 seconds" in samples[0].failure


def test_code_runs_inside_a_worker() -> None:
    right, wrong = "def f(x):\n    return x + 1", "def f(x):\n    import os\n    os._exit(0)"
    prompt = make_prompt(tests=["assert f(1) == 2", "assert f(2) > 2"])
    samples = [make_sample(f"```python\n{text}\n```") for text in (right, wrong, right)]
    scored = score([RewardSettings(name="code")], Group(prompt, samples))
    assert [sample.failure for sample in scored] == [""] * 3
    assert [sample.reward for sample in scored] == [1.0, 0.0, 1.0]


def test_a_pattern_that_never_ends_costs_its_sample_only() -> None:
    rewards = [RewardSettings(name="format", options={"pattern": "(a+)+b"})]
    settings = ScoringSettings(num_workers=1, max_failed_fraction=1.0, timeout_seconds=1.0)
    group = Group(make_prompt(), [make_sample("a" * 60), make_sample("aab")])
    with closing(Scorer(rewards, settings)) as scorer:
        scorer.finish_all([group])
    assert [sample.reward for sample in group.samples] == [None, 1.0]


@pytest.mark.parametrize("outcome", [0.25, None])
def test_the_outcome_of_a_conversation(outcome: float | None) -> None:
    sample = make_sample()
    sample.outcome = outcome
    score([RewardSettings(name="outcome")], Group(make_prompt(), [sample]))
    assert sample.reward == outcome
    assert bool(sample.failure) == (outcome is None)
