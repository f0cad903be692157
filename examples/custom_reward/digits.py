"""A reward of one's own: partial credit for a sum, digit by digit."""

from __future__ import annotations

from megarl.core.sample import Prompt, Sample


def right_digits(prompt: Prompt, sample: Sample, *, after: str) -> float:
    """1 for the right number after the last ``after``; for a wrong one half of the share of its right digits.

    Digits are compared from the right, as they are added. A response without a number earns 0.
    """
    _, marker, found = sample.response.rpartition(after)
    wanted = prompt.answer or ""
    if not marker or not found.isdigit():
        return 0.0
    if found == wanted:
        return 1.0
    num_right = sum(ours == theirs for ours, theirs in zip(reversed(found), reversed(wanted), strict=False))
    return 0.5 * num_right / max(len(found), len(wanted))
