"""Numbers in JSON, which has no NaN and no infinity: those are written as text."""

from __future__ import annotations

import math


def number_for_json(value: float) -> float | str:
    """The number, or "NaN", "Infinity", "-Infinity"."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def number_from_json(value: object) -> float:
    """The inverse. Anything else is a ValueError."""
    if isinstance(value, (int, float)):
        return value
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(str(value))
    raise ValueError(f"{value!r} is not a number")
