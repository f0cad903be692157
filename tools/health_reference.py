"""Writes docs/health.md from the table of rules: ``python tools/health_reference.py``."""

from __future__ import annotations

from pathlib import Path

from megarl.config.alerts import AlertSettings
from megarl.config.health_rules import HEALTH_RULES, HealthRule
from megarl.metrics.health.alert import format_alert
from megarl.metrics.health.health import Health

TARGET = Path(__file__).parent.parent / "docs" / "health.md"

INTRO = """\
# Health rules

<!-- Written by tools/health_reference.py. Change megarl/config/health_rules.py or the tool, then run it. -->

After every step megarl compares the step's metrics with the rules below. A rule that finds something says what is
wrong, with numbers, and what to do about it, in one line on the console:

```
{example}
```

The level of every rule (0 fine, 1 info, 2 warn, 3 critical) is in the step's metrics as `alerts/H05`; a rule whose
metrics the step lacks is left out. Rules read [canonical names](metrics.md).

- **Warm-up:** that many steps with the rule's metrics pass before it may speak. They are counted anew when a run goes
  from demonstrations to rewards, or from the critic alone to both models; so are "first" and "early" steps. Only the
  evaluation (H21) and host memory (H25) go on.
- **Patience:** that many steps in a row must meet the condition. The level is the severity that all of them reached.
- **Cool-down:** that many steps pass between two alerts of a rule. One that is worse than the last speaks at once.
- A run that is resumed goes on with what the rules knew.

## Settings

```yaml
alerts:
  enabled: true
  rules:                                # default: no changes
    H05: {warn: 0.05, patience: 3}      # thresholds, warmup, patience, cooldown
    H12: {enabled: false}
  fatal: [H09, H14]                     # these stop the run when they warn: exit code 65
```

Nothing stops a run unless `alerts.fatal` names it. A rule in it has no cool-down.

Many ranges come from a few published runs, or from one. They are a place to start; change them to what is usual for
your model.

"""


def reference() -> str:
    """The whole document."""
    head = ("rule", "metrics", "speaks when", "severity", "thresholds", "warm-up, patience, cool-down", "what to do")
    rows = [head, ("---",) * len(head), *(_row(rule) for rule in HEALTH_RULES.values())]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    intro = INTRO.replace("{example}", _example())
    return f"{intro}## Rules\n\n{len(HEALTH_RULES)} rules, with their defaults.\n\n{table}"


def _example() -> str:
    """What is really said when a metric is too high for two steps."""
    health = Health(AlertSettings())
    alerts = [alert for step in (11, 12) for alert in health.check(step, {"actor/ppo_kl": 0.031})]
    return "\n".join(format_alert(alert, 12) for alert in alerts)


def _row(rule: HealthRule) -> tuple[str, ...]:
    limits = {name: f"{value:g}" for name, value in rule.thresholds.items()}
    meaning = rule.meaning[0].upper() + rule.meaning[1:]
    return (
        rule.id,
        "<br>".join("any" if name == "*" else f"`{name}`" for name in rule.metrics.split()),
        rule.condition.format(**limits),
        rule.severity,
        "<br>".join(f"`{name}: {value}`" for name, value in limits.items()),
        f"{rule.warmup}, {rule.patience}, {rule.cooldown}",
        f"{meaning}. {rule.advice}",
    )


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
    print(f"wrote {TARGET} with {len(HEALTH_RULES)} rules")
