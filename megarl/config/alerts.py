"""When a run raises its voice."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from megarl.config.section import Section, setting


def _default_is_no_change(value: Any) -> Any:
    """``default`` is short for no changes."""
    return {} if value == "default" else value


# What a mapping may hold is checked in `alert_checks`, where a mistake can be told with its line and a suggestion.
RuleChanges = Annotated[dict[str, Any], BeforeValidator(_default_is_no_change)]


class AlertSettings(Section):
    """Health rules over the metrics of every step."""

    enabled: bool = setting(True, "Check the health rules after every step.")
    rules: RuleChanges = setting(
        "default",
        "Changes to rules, by id: enabled, warmup, patience, cooldown and the thresholds that docs/health.md lists.",
        rule="default, or a mapping such as {H05: {warn: 0.05, patience: 3}, H12: {enabled: false}}",
    )
    fatal: list[str] = setting(
        [],
        "Rules that stop the run when they warn, such as [H09, H14].",
        rule="rules that docs/health.md gives as warn or critical, in brackets: [H09, H14]",
    )
