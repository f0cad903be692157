"""Rewards as a name, a mapping or a list: what is read, and that a mistake is found on its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.rewards import RewardSettings
from tests.unit.config_files import MINIMAL, load_text, refusal


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("coin_flip", [RewardSettings(name="coin_flip")]),
        ("{name: coin_flip, weight: 2.0}", [RewardSettings(name="coin_flip", weight=2.0)]),
        (
            "[coin_flip, {name: my.module:fn, label: mine, weight: -0.5, options: {a: [1]}}]",
            [
                RewardSettings(name="coin_flip"),
                RewardSettings(name="my.module:fn", label="mine", weight=-0.5, options={"a": [1]}),
            ],
        ),
    ],
    ids=["name", "mapping", "list"],
)
def test_three_spellings(written: str, read: list[RewardSettings], tmp_path: Path) -> None:
    config = load_text(
        tmp_path, f"{MINIMAL}\nreward: {written}\neval: {{sets: {{a: {{data: builtin:sort, reward: {written}}}}}}}\n"
    )
    assert config.reward == read
    assert config.eval.sets["a"].reward == read


def test_labels() -> None:
    names = [RewardSettings(name="my.module:fn"), RewardSettings(), RewardSettings(name="a:b", label="c")]
    assert [one.shown_label for one in names] == ["fn", "exact_match", "c"]


@pytest.mark.parametrize(
    ("lines", "number", "told"),
    [
        ("reward: exact_matsch", 0, 'reward="exact_matsch"'),
        ("reward:\n  nam: coin_flip", 1, "reward.nam is not a setting. Did you mean reward.name?"),
        ("reward:\n  name: coin_flip\n  weight: much", 2, 'reward.weight="much"'),
        ("reward:\n  - coin_flip\n  - exact_matsch", 2, 'reward.1="exact_matsch"'),
        ("reward:\n  - coin_flip\n  - name: exact_match\n    wieght: 2", 3, "Did you mean reward.1.weight?"),
        ("reward:\n  - name: exact_match\n    options: {befor: x}", 2, "reward.options.befor is not an option"),
        ("reward:\n  - coin_flip\n  - name: exact_match\n    options: {befor: x}", 3, "reward.1.options.befor"),
        ("reward:\n  - coin_flip\n  - exact_match\n  - coin_flip", 3, "MRL-1460"),
        ("reward: []", 0, "reward=a list of 0"),
        ("reward:\n  - 5", 1, "reward.0=5"),
    ],
)
def test_a_mistake_is_found_on_its_line(lines: str, number: int, told: str, tmp_path: Path) -> None:
    first = len(MINIMAL.rstrip("\n").splitlines()) + 1
    message = refusal(tmp_path, f"{MINIMAL.rstrip()}\n{lines}\n")
    assert told in message
    assert f".yaml:{first + number} " in message


def test_the_command_line_changes_a_mapping_and_replaces_a_list(tmp_path: Path) -> None:
    mapping = f"{MINIMAL}\nreward: {{name: my:fn, weight: 3.0}}\n"
    assert load_text(tmp_path, mapping, "reward.name=coin_flip").reward == [
        RewardSettings(name="coin_flip", weight=3.0)
    ]
    several = f"{MINIMAL}\nreward: [exact_match, coin_flip]\n"
    assert load_text(tmp_path, several, "reward.name=coin_flip").reward == [RewardSettings(name="coin_flip")]
