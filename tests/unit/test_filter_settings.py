"""Filters in a configuration: what `megarl check` says about right and wrong ones."""

from __future__ import annotations

import pytest

from megarl.cli import main
from tests.e2e.runs import QUICKSTART


def checked(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, str]:
    code = main(["check", str(QUICKSTART), *overrides])
    out, problems = capsys.readouterr()
    return code, out + problems


def test_filters_by_name_with_options_and_by_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    listed = "[zero_variance, {name: length, options: {max_tokens: 9}}, 'my.filters:keep']"
    code, text = checked(capsys, f"rollout.filters={listed}", "rollout.max_refills=3")
    assert code == 0
    assert "filters           zero_variance, length, keep\n" in text
    assert "refills           at most 3: 128 prompts per step if nothing is kept\n" in text


@pytest.mark.parametrize(
    ("filters", "code", "told"),
    [
        ("3", "MRL-1003", "must be a list"),
        ("[zero_varianc]", "MRL-1004", "Did you mean zero_variance?"),
        ("[{name: length, optons: {}}]", "MRL-1001", "rollout.filters.0.optons is not a setting."),
        ("[{options: {}}]", "MRL-1002", "rollout.filters.0.name is required"),
        ("[{name: length, options: {max_token: 3}}]", "MRL-1001", "Did you mean max_tokens?"),
        ("[{name: length, options: {max_tokens: 0}}]", "MRL-1003", "a whole number >= 1"),
        ("[{name: length, options: {drop: all}}]", "MRL-1003", "samples or group"),
        ("[{name: reward_range}]", "MRL-1002", "needs a limit"),
        ("[{name: reward_range, options: {low: 1, high: 0}}]", "MRL-1005", "would drop everything"),
        ("[{name: reward_range, options: {low: x, high: true}}]", "MRL-1003", "a number"),
        ("[{name: reward_range, options: {low: null}}]", "MRL-1002", "needs a limit"),
    ],
)
def test_a_wrong_filter_is_explained(capsys: pytest.CaptureFixture[str], filters: str, code: str, told: str) -> None:
    exit_code, text = checked(capsys, f"rollout.filters={filters}")
    assert exit_code == 64
    assert code in text
    assert told in text


def test_groups_of_one_have_no_variance(capsys: pytest.CaptureFixture[str]) -> None:
    one = ("rollout.filters=[zero_variance]", "rollout.group_size=1", "algorithm={name: ppo}")
    exit_code, text = checked(capsys, *one)
    assert exit_code == 64
    assert "MRL-1005" in text and "rollout.group_size=1" in text
