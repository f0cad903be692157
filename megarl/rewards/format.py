"""1 if the response has a form, else 0."""

from __future__ import annotations

import re

from megarl.core.sample import Prompt, Sample
from megarl.rewards.final_answer import last_words

# Each part may hold anything but the tags themselves, and ``(?>…)`` goes to the last mark and never back: there is one
# way to match, so that a response of any kind takes time in proportion to its length.
_INSIDE = r"(?:(?!</?(?:think|answer)>).)*"
PRESETS = {
    "think_answer": rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*",
    "think": rf"\s*<think>{_INSIDE}</think>(?:(?!</?think>).)+",
    "boxed": r"(?>.*\\boxed\{).+\}.*",
    "hashes": r"(?>.*####)[ \t]*+\S[^\n]*+\s*+",
}


def has_format(
    prompt: Prompt,  # noqa: ARG001
    sample: Sample,
    *,
    preset: str | None = None,
    pattern: str | None = None,
) -> float:
    """Whether the response as a whole, or of several turns the policy's last one, matches a regular expression.

    The expression is Python's; a dot matches line ends too. Exactly one of ``preset`` and ``pattern`` is given.
    """
    expression = PRESETS[preset] if preset is not None else pattern or ""
    return float(re.fullmatch(expression, last_words(sample), re.DOTALL) is not None)
