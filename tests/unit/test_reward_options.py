"""The options of built-in rewards: what is wrong with them is found by reading the configuration alone."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.load import load_config
from megarl.config.names import REWARD_MODEL, REWARDS
from megarl.config.reward_option_checks import check_options
from megarl.config.reward_options import REWARD_OPTIONS
from megarl.core.errors import ConfigError
from megarl.rewards.format import PRESETS
from megarl.rewards.load import BUILTINS, load_reward

GOOD: dict[str, dict[str, Any]] = {
    "exact_match": {"after": ":"},
    "math_answer": {"last_number": True},
    "format": {"preset": "boxed"},
    "length": {"max_tokens": 100, "buffer_tokens": 20},
    "code": {"tests_key": "tests", "partial": True},
    "remote": {"url": "https://rewards.example/score", "headers": {"X-Team": "env:TEAM"}, "api_key": "env:KEY"},
    "judge": {"url": "http://127.0.0.1:8000/v1", "model": "m", "template": "Grade {response}.", "api_key": "file:/k"},
    "outcome": {},
    "coin_flip": {},
}


def problems(name: str, options: dict[str, Any]) -> list[str]:
    return [f"{found.code} {found.text}" for found in check_options(name, options, [("reward",)])]


@pytest.mark.parametrize("name", GOOD)
def test_good_options_fit_the_schema_and_the_function(name: str) -> None:
    assert problems(name, GOOD[name]) == []
    load_reward(name, GOOD[name])


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("exact_match", {"after": ""}, 'MRL-1004 reward.options.after="" is not allowed. It must be text or null.'),
        (
            "math_answer",
            {"last_nmber": True},
            "MRL-1001 reward.options.last_nmber is not an option of math_answer.",
        ),
        ("math_answer", {"last_number": "yes"}, 'MRL-1003 reward.options.last_number="yes" is not allowed. It must be'),
        ("format", {}, "MRL-1005 reward.options does not fit format: give exactly one of preset and pattern."),
        ("format", {"preset": "boxed", "pattern": "x"}, "MRL-1005"),
        (
            "format",
            {"preset": "box"},
            'MRL-1004 reward.options.preset="box" is not allowed. It must be one of',
        ),
        ("format", {"pattern": "("}, 'MRL-1004 reward.options.pattern="(" is not allowed (not a regular expression: '),
        ("length", {"max_tokens": 5}, "MRL-1002 reward.options.buffer_tokens is required by length but not given."),
        ("length", {"max_tokens": 5, "buffer_tokens": 6}, "MRL-1005 reward.options does not fit length: buffer_tokens"),
        (
            "length",
            {"max_tokens": 0, "buffer_tokens": 1},
            "MRL-1004 reward.options.max_tokens=0 is not allowed.",
        ),
        (
            "code",
            {"timeout_seconds": 0},
            "MRL-1004 reward.options.timeout_seconds=0 is not allowed.",
        ),
        ("code", {"memory_gb": 1e6}, "MRL-1004"),
        ("remote", {"url": "ftp://x"}, 'MRL-1004 reward.options.url="ftp://x" is not allowed (it must start with http'),
        ("remote", {"url": "http://x/ y"}, "MRL-1004"),
        ("remote", {}, "MRL-1002 reward.options.url is required by remote but not given."),
        ("remote", {"url": "http://x", "api_key": "hunter2"}, "MRL-1004"),
        ("remote", {"url": "http://x", "headers": {"a": 1}}, "MRL-1003"),
        ("judge", {**GOOD["judge"], "verdict": "x"}, "MRL-1004"),
        (
            "judge",
            {**GOOD["judge"], "min_score": 10.0},
            "MRL-1005 reward.options does not fit judge: min_score",
        ),
        (
            "judge",
            {**GOOD["judge"], "template": "Grade it."},
            "MRL-1005 reward.options does not fit judge: template",
        ),
        ("outcome", {"x": 1}, "MRL-1001 reward.options.x is not an option of outcome."),
    ],
)
def test_wrong_options_are_told(name: str, options: dict[str, Any], told: str) -> None:
    (found,) = problems(name, options)
    assert found.startswith(told)


def test_a_reward_that_may_take_as_long_as_the_scorer_waits_is_told(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    config.write_text(f"extends: {quickstart}\nreward:\n  - {{name: code, options: {{timeout_seconds: 10.0}}}}\n")
    with pytest.raises(ConfigError, match=r"MRL-1475 .*run.yaml:3 .*timeout_seconds=10 is not below"):
        load_config(config, [])
    load_config(config, ["scoring.timeout_seconds=11"])


def test_the_tables_name_the_same_rewards_and_options() -> None:
    assert list(REWARD_OPTIONS) == list(REWARDS)
    # the reward model is no function
    functions = {name: kind for name, kind in REWARD_OPTIONS.items() if name != REWARD_MODEL}
    assert list(functions) == list(BUILTINS) == list(GOOD)
    for name, kind in functions.items():
        parameters = inspect.signature(load_reward(name, GOOD[name]).function).parameters
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            assert set(parameters) - {"prompt", "sample"} == set(kind.model_fields)
            defaults = {key: field.default for key, field in kind.model_fields.items() if not field.is_required()}
            assert defaults == {key: parameters[key].default for key in defaults}
    assert set(PRESETS) == {"think_answer", "think", "boxed", "hashes"}


def test_checking_imports_neither_torch_nor_what_rewards_need(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom megarl.cli import main\n"
        "code = main(['check', sys.argv[1]])\n"
        "loaded = {'torch', 'math_verify', 'sympy', 'aiohttp'} & set(sys.modules)\nsys.exit(code or len(loaded))"
    )
    quickstart = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    config = tmp_path / "run.yaml"
    config.write_text(
        f"extends: {quickstart}\nreward:\n"
        "  - {name: length, weight: 0.5, options: {max_tokens: 60, buffer_tokens: 20}}\n"
        "  - {name: judge, options: {url: 'http://127.0.0.1:1/v1', model: m}}\n"
    )
    ran = subprocess.run([sys.executable, "-c", script, str(config)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stdout + ran.stderr
