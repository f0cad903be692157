"""Where a response states its answer. Only that is compared: numbers on the way to it count for nothing."""

from __future__ import annotations

import re

from megarl.core.sample import Sample

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def last_words(sample: Sample) -> str:
    """What the policy said last. Of several turns the last one of its own: a tool's output must not answer for it."""
    if not sample.turns:
        return sample.response
    return next((turn.text for turn in reversed(sample.turns) if turn.speaker == "policy"), "")


def final_answer(text: str, last_number: bool = False) -> str | None:
    r"""The answer that the text marks as final, or None.

    The last ``<answer>…</answer>`` limits where to look, if there is one. In it the last ``\boxed{…}`` counts, or else
    the line after the last ``####``, or else all that stands between the tags. With ``last_number``, a text that marks
    nothing answers with the last number in it.
    """
    tagged = _last_tagged(text)
    region = text if tagged is None else tagged
    boxed = _last_boxed(region)
    if boxed is not None:
        return boxed
    _, marker, rest = region.rpartition("####")
    if marker:
        return rest.strip().partition("\n")[0].strip()
    if tagged is not None:
        return tagged.strip()
    numbers = _NUMBER.findall(text) if last_number else []
    return numbers[-1].rstrip(",") if numbers else None


def _last_tagged(text: str) -> str | None:
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text[start + len("<answer>") : end] if start >= 0 else None


def _last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{`` that is closed encloses. One pass, however many braces there are."""
    found = (-1, -1)
    open_braces: list[int | None] = []  # where the content starts, for braces that belong to a box
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            start = open_braces.pop() if open_braces else None
            if start is not None and start > found[0]:
                found = (start, match.start())
        elif token.endswith("{") and token != r"\{":
            open_braces.append(match.end() if token.startswith(r"\boxed") else None)
    return text[found[0] : found[1]].strip() if found[0] >= 0 else None
