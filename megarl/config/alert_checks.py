"""The settings of health rules: unknown rules, unknown thresholds, impossible numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megarl.config import catalogue
from megarl.config.health_rules import HEALTH_RULES, HealthRule
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.schema import RunConfig

_RULES: KeyPath = ("alerts", "rules")
_FATAL: KeyPath = ("alerts", "fatal")
# setting of every rule -> smallest and largest value; a rule remembers one severity per step of its patience
_COUNTS = {"warmup": (0, 1_000_000), "patience": (1, 10_000), "cooldown": (0, 1_000_000_000)}
_LARGEST = 1e12


def check_alerts(config: RunConfig) -> Iterator[Problem]:
    """Every mistake in ``alerts``."""
    for rule_id, changes in config.alerts.rules.items():
        rule = HEALTH_RULES.get(rule_id)
        if rule is None:
            path = (*_RULES, rule_id)
            yield _unknown_rule("MRL-1001", f"{dotted(path)} is not a health rule", rule_id, path)
        elif not isinstance(changes, dict):
            text = f"{dotted((*_RULES, rule_id))}={show(changes)} is not allowed. It must be a mapping."
            hint = f"Write {rule_id}: {{enabled: false}} to switch the rule off. {_settings_of(rule)}"
            yield Problem("MRL-1003", text, ((*_RULES, rule_id),), (hint,))
        else:
            yield from _changes(rule, changes)
    yield from _fatal(config)


def _changes(rule: HealthRule, changes: dict[str, Any]) -> Iterator[Problem]:
    for name, value in changes.items():
        path = (*_RULES, rule.id, name)
        if name not in ("enabled", *_COUNTS, *rule.thresholds):
            close = catalogue.closest(name, ("enabled", *_COUNTS, *rule.thresholds))
            meant = f" Did you mean {close}?" if close else ""
            text = f"{dotted(path)} is not a setting of {rule.id}.{meant}"
            yield Problem("MRL-1001", text, (path,), (_settings_of(rule),))
            continue
        allowed = _allowed(name)
        if not _is_allowed(name, value):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            code = "MRL-1004" if is_number and name != "enabled" else "MRL-1003"
            yield Problem(code, f"{dotted(path)}={show(value)} is not allowed. It must be {allowed}.", (path,))


def _allowed(name: str) -> str:
    if name == "enabled":
        return "true or false"
    if name in _COUNTS:
        smallest, largest = _COUNTS[name]
        return f"a whole number >= {smallest} and <= {largest}"
    return f"a number >= {-_LARGEST:g} and <= {_LARGEST:g}"


def _is_allowed(name: str, value: Any) -> bool:
    if name == "enabled":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if name in _COUNTS:
        smallest, largest = _COUNTS[name]
        return isinstance(value, int) and smallest <= value <= largest
    return isinstance(value, (int, float)) and -_LARGEST <= value <= _LARGEST


def _fatal(config: RunConfig) -> Iterator[Problem]:
    for rule_id in config.alerts.fatal:
        rule = HEALTH_RULES.get(rule_id)
        changes = config.alerts.rules.get(rule_id)
        if rule is None:
            yield _unknown_rule("MRL-1004", f"{dotted(_FATAL)}: {show(rule_id)} is not a health rule", rule_id, _FATAL)
        elif not rule.may_stop_a_run:
            text = f"{dotted(_FATAL)}: {rule_id} only informs ({rule.meaning}) and never stops a run."
            may = ", ".join(one.id for one in HEALTH_RULES.values() if one.may_stop_a_run)
            yield Problem("MRL-1004", text, (_FATAL,), (f"Rules that can: {may}.",))
        elif isinstance(changes, dict) and changes.get("enabled") is False:
            yield Problem(
                "MRL-1005",
                f"{dotted(_FATAL)} names {rule_id}, which alerts.rules.{rule_id}.enabled=false switches off.",
                (_FATAL, (*_RULES, rule_id, "enabled")),
                (f"Set alerts.rules.{rule_id}.enabled: true, or take {rule_id} out of alerts.fatal.",),
            )
    if config.alerts.fatal and not config.alerts.enabled:
        yield Problem(
            "MRL-1005",
            "alerts.enabled=false switches off the rules that alerts.fatal names.",
            (("alerts", "enabled"), _FATAL),
            ("Set alerts.enabled: true, or alerts.fatal: []",),
        )


def _unknown_rule(code: str, text: str, rule_id: str, path: KeyPath) -> Problem:
    written = re.fullmatch(r"[Hh]?[-_ ]?0*([1-9][0-9]?)", rule_id, re.ASCII)  # H5, h05, 5
    close = f"H{int(written[1]):02d}" if written else ""
    meant = f". Did you mean {close}?" if close in HEALTH_RULES else "."
    return Problem(code, text + meant, (path,), (f"Rules: {', '.join(HEALTH_RULES)}.",))


def _settings_of(rule: HealthRule) -> str:
    defaults = {"warmup": rule.warmup, "patience": rule.patience, "cooldown": rule.cooldown, **rule.thresholds}
    return f"Settings of {rule.id}: enabled, {', '.join(f'{name} ({value:g})' for name, value in defaults.items())}."
