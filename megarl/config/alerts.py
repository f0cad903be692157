"""When a run raises its voice."""

from __future__ import annotations

from megarl.config.section import Section, setting


class AlertSettings(Section):
    """Health rules over the metrics of every step."""

    enabled: bool = setting(True, "Check the health rules after every step.")
    fatal: list[str] = setting([], "Rules that stop the run, such as [H09, H14].")
