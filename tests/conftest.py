"""For all tests: a shared machine may be busy, and a slow draw of hypothesis says nothing about megarl."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")
