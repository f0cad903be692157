"""What the health rules said, by rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megarl.report.series import Column, evenly

PREFIX = "alerts/"
_MAX_MARKS = 200


@dataclass(slots=True)
class _Rule:
    severity: int = 0
    message: str = ""
    steps: list[int] = field(default_factory=list)


class AlertLog:
    """Collects the alerts of a ledger's lines."""

    def __init__(self) -> None:
        self._rules: dict[str, _Rule] = {}

    def take(self, step: int, alerts: object) -> None:
        """The ``alerts`` of one line; entries that are none are passed over."""
        for alert in alerts if isinstance(alerts, list) else ():
            if isinstance(alert, dict) and isinstance(alert.get("rule"), str):
                severity = alert.get("severity")
                self._add(alert["rule"], step, severity if isinstance(severity, int) else 1, alert.get("message"))

    def take_levels(self, columns: Mapping[str, Column]) -> None:
        """Rules of which the ledger has only the level (``alerts/H05``)."""
        for name, column in columns.items():
            rule = name.removeprefix(PREFIX)
            if name.startswith(PREFIX) and rule not in self._rules:
                for step, level in zip(column.steps.tolist(), column.values.tolist(), strict=True):
                    if level > 0:
                        self._add(rule, step, int(min(level, 3)), None)

    def rows(self) -> list[dict[str, Any]]:
        """One row per rule, the gravest and most frequent first."""
        rules = sorted(self._rules.items(), key=lambda item: (-item[1].severity, -len(item[1].steps)))
        return [
            {
                "rule": name,
                "severity": rule.severity,
                "first": min(rule.steps),
                "last": max(rule.steps),
                "count": len(rule.steps),
                "message": rule.message,
                "steps": evenly(rule.steps, _MAX_MARKS),
            }
            for name, rule in rules
        ]

    def _add(self, name: str, step: int, severity: int, message: object) -> None:
        rule = self._rules.setdefault(name, _Rule())
        rule.severity = max(rule.severity, min(max(severity, 1), 3))
        rule.message = message if isinstance(message, str) else rule.message
        rule.steps.append(step)
