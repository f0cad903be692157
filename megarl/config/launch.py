"""How ranks are started and watched."""

from __future__ import annotations

from megarl.config.section import Section, setting


class LaunchSettings(Section):
    """How ranks are started and watched."""

    hang_timeout_seconds: float | None = setting(
        1800.0,
        "If no rank gets on for this long (ten times as long before the first step), or one is stopped for this long, "
        "all of them are ended; null: wait for ever, as with a debugger.",
        ge=1.0,
        le=1e9,
        elsewhere="nccl_timeout distributed_timeout_minutes timeout_minutes watchdog_timeout",
    )
    join_timeout_seconds: float = setting(
        300.0,
        "How long ranks wait for each other at the start.",
        ge=1.0,
        le=1e6,
        elsewhere="rdzv_timeout init_timeout",
    )
