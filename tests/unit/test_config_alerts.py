"""Settings of health rules: what may be changed, and what a mistake is answered with."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.resolved import dump_resolved
from tests.unit.config_files import MINIMAL, load_text, refusal


def with_alerts(text: str) -> str:
    return f"{MINIMAL}alerts:\n  {text}\n"


@pytest.mark.parametrize(
    ("text", "start"),
    [
        (
            "rules: {H5: {warn: 1}}",
            "MRL-1001 run.yaml:22 alerts.rules.H5 is not a health rule. Did you mean H05?\n    Rules: H01, H02, H03",
        ),
        ("rules: {H99: {}}", "MRL-1001 run.yaml:22 alerts.rules.H99 is not a health rule.\n    Rules: H01, H02"),
        (
            "rules: {H05: {cool_down: 1}}",
            "MRL-1001 run.yaml:22 alerts.rules.H05.cool_down is not a setting of H05. Did you mean cooldown?\n"
            "    Settings of H05: enabled, warmup (0), patience (2), cooldown (50), warn (0.02), critical (0.1).",
        ),
        ("rules: {H08: {critical: 1}}", "MRL-1001 run.yaml:22 alerts.rules.H08.critical is not a setting of H08."),
        (
            "rules: {H05: {warn: high}}",
            'MRL-1003 run.yaml:22 alerts.rules.H05.warn="high" is not allowed. It must be a number >= -1e+12 and',
        ),
        ("rules: {H05: {warn: true}}", "MRL-1003 run.yaml:22 alerts.rules.H05.warn=true is not allowed."),
        (
            "rules: {H05: {enabled: 1}}",
            "MRL-1003 run.yaml:22 alerts.rules.H05.enabled=1 is not allowed. It must be true",
        ),
        (
            "rules: {H05: {patience: 0}}",
            "MRL-1004 run.yaml:22 alerts.rules.H05.patience=0 is not allowed. It must be a whole number >= 1 "
            "and <= 10000.",
        ),
        ("rules: {H05: {warmup: 1.5}}", "MRL-1004 run.yaml:22 alerts.rules.H05.warmup=1.5 is not allowed."),
        (
            "rules: {H05: false}",
            "MRL-1003 run.yaml:22 alerts.rules.H05=false is not allowed. It must be a mapping.\n"
            "    Write H05: {enabled: false} to switch the rule off.",
        ),
        ("rules: none", 'MRL-1003 run.yaml:22 alerts.rules="none" is not allowed. It must be default, or a mapping'),
        ("fatal: [H9]", 'MRL-1004 run.yaml:22 alerts.fatal: "H9" is not a health rule. Did you mean H09?'),
        (
            "fatal: [H01]",
            "MRL-1004 run.yaml:22 alerts.fatal: H01 only informs (the score has not improved for 100 steps) and never "
            "stops a run.\n    Rules that can: H02, H03",
        ),
        ("fatal: H09", 'MRL-1003 run.yaml:22 alerts.fatal="H09" is not allowed. It must be rules that docs/health.md'),
        (
            "rules: {H09: {enabled: false}}\n  fatal: [H09]",
            "MRL-1005 run.yaml:23 alerts.fatal names H09, which alerts.rules.H09.enabled=false switches off.",
        ),
        ("enabled: false\n  fatal: [H09]", "MRL-1005 run.yaml:22 alerts.enabled=false switches off the rules that"),
    ],
)
def test_a_mistake_is_named_with_its_line(tmp_path: Path, text: str, start: str) -> None:
    assert refusal(tmp_path, with_alerts(text)).startswith(start)


def test_rules_are_changed_in_files_and_on_the_command_line(tmp_path: Path) -> None:
    text = with_alerts("rules: {H05: {warn: 0.05, patience: 3}, H12: {enabled: false}}\n  fatal: [H09, H14]")
    config = load_text(tmp_path, text, "alerts.rules.H05.warn=1")
    assert config.alerts.rules == {"H05": {"warn": 1, "patience": 3}, "H12": {"enabled": False}}
    assert config.alerts.fatal == ["H09", "H14"]
    assert load_text(tmp_path, dump_resolved(config)) == config


def test_default_is_no_change(tmp_path: Path) -> None:
    config = load_text(tmp_path, with_alerts("rules: default"))
    assert config.alerts.rules == {}
    assert config == load_text(tmp_path, MINIMAL)
    assert load_text(tmp_path, dump_resolved(config)) == config
