"""Foreign text in messages: short, on one line, and unable to disturb a terminal or a log."""

from __future__ import annotations

MAX_EXCERPT = 80


def excerpt(text: str, around: int = 0) -> str:
    """At most 80 characters of ``text`` near position ``around``, quoted, with everything unprintable escaped."""
    start = max(0, min(around - MAX_EXCERPT // 2, len(text) - MAX_EXCERPT))
    # repr escapes control characters, newlines, lone surrogates and direction overrides.
    quoted = repr(text[start : start + MAX_EXCERPT])
    return quoted if len(quoted) <= MAX_EXCERPT else quoted[: MAX_EXCERPT - 1] + "…"
