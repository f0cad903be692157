"""What a rule says, and how it is written on the console."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """How bad it is; the level that a run reports as ``alerts/{rule}``, where 0 is fine."""

    INFO = 1
    WARN = 2
    CRITICAL = 3


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule raising its voice. The message says what is wrong, with numbers, and then what to do."""

    rule: str
    severity: Severity
    message: str


def format_alert(alert: Alert, step: int) -> str:
    """The console line: one line of ASCII that starts with ALERT, so that it is never taken for a step's."""
    line = f"ALERT {alert.rule} {alert.severity.name.lower()} step {step}: {alert.message}"
    return " ".join(line.split()).encode("ascii", "backslashreplace").decode("ascii")
