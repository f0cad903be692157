"""What a rule is, and its warm-up, patience and cool-down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from megarl.config.health_rules import HealthRule
from megarl.metrics.health.alert import Alert, Severity
from megarl.metrics.health.seen import Seen


class Finding(NamedTuple):
    """What a rule makes of a step: a level from 0 to 3, and the numbers. ``remark`` replaces meaning and advice.

    Findings of one rule compare by level first, so that `max` is the worst.
    """

    level: int
    text: str = ""
    remark: str = ""


FINE = Finding(0)


class Rule(ABC):
    """One row of the table. Its memory is bounded and follows from the steps it has judged and nothing else."""

    # Whether a new stage of the run (demonstrations, then rewards) starts the rule afresh: other work, other numbers.
    per_stage: ClassVar[bool] = True
    # What the rule must know about the run; it stands among the limits.
    facts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, limits: Mapping[str, float]) -> None:
        self.limits = limits

    @abstractmethod
    def judge(self, seen: Seen) -> Finding | None:
        """The verdict on a step, or None where the step says nothing about it."""


def above(name: str, value: float, limits: Mapping[str, float]) -> Finding:
    """The worst severity whose limit the value exceeds."""
    for severity in (Severity.CRITICAL, Severity.WARN, Severity.INFO):
        limit = limits.get(severity.name.lower())
        if limit is not None and value > limit:
            return Finding(severity, f"{name} is {number(value)}, above {number(limit)}")
    return FINE


def number(value: float) -> str:
    """Four digits are enough to act upon."""
    return f"{value:.4g}"


class Watch:
    """A rule at work: it speaks after its warm-up, when its patience is at an end, and not again while it cools down.

    The level of a step is the severity that every one of the last ``patience`` judged steps reached. A level above that
    of the last alert speaks at once; otherwise ``cooldown`` steps pass between two alerts.
    """

    def __init__(
        self,
        kind: type[Rule],
        spec: HealthRule,
        changes: Mapping[str, Any],
        is_fatal: bool,
        facts: Mapping[str, float],
    ) -> None:
        """``changes`` are the user's; ``facts`` are about the run, for rules that ask for them."""
        self._kind = kind
        self._spec = spec
        thresholds = {name: float(changes.get(name, value)) for name, value in spec.thresholds.items()}
        self._limits = {**{name: facts[name] for name in kind.facts}, **thresholds}
        self._warmup = int(changes.get("warmup", spec.warmup))
        self._patience = int(changes.get("patience", spec.patience))
        # What stops a run must not be missed because it was said lately.
        self._cooldown = 0 if is_fatal else int(changes.get("cooldown", spec.cooldown))
        self._spoken: tuple[int, int] | None = None  # step and level of the last alert
        self._start()

    def _start(self) -> None:
        self._rule = self._kind(self._limits)
        self._num_warming = 0
        self._num_hits = 0  # steps in a row that met the condition
        self._recent: deque[int] = deque(maxlen=self._patience)

    def enter_stage(self) -> None:
        """The run does other work from now on."""
        if self._kind.per_stage:
            self._start()

    def check(self, step: int, seen: Seen) -> tuple[int | None, Alert | None]:
        """The level of the step (None: it says nothing about this rule), and the alert to raise, if any."""
        finding = self._rule.judge(seen)
        if finding is None:
            return None, None
        if self._num_warming < self._warmup:
            self._num_warming += 1
            return 0, None
        self._recent.append(int(finding.level))
        self._num_hits = self._num_hits + 1 if finding.level else 0
        level = min(self._recent) if self._num_hits >= self._patience else 0
        return level, self._speak(step, level, finding) if level else None

    def _speak(self, step: int, level: int, finding: Finding) -> Alert | None:
        if self._spoken is not None:
            last_step, last_level = self._spoken
            if level <= last_level and step - last_step < self._cooldown:
                return None
        self._spoken = (step, level)
        lasting = f" ({self._num_hits} times in a row)" if self._num_hits > 1 else ""
        remark = finding.remark or f"{self._spec.meaning}. {self._spec.advice}"
        return Alert(self._spec.id, Severity(level), f"{finding.text}{lasting}: {remark}")
