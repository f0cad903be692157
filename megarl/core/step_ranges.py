"""Many step numbers in a few words."""

from __future__ import annotations

from collections.abc import Sequence


def step_ranges(steps: Sequence[int]) -> str:
    """1-5, 7 for 1 2 3 4 5 7; the first few if there are many."""
    ranges: list[list[int]] = []
    for step in steps:
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    shown = [f"{first}-{last}" if last > first else str(first) for first, last in ranges[:8]]
    return ", ".join(shown) + (", ..." if len(ranges) > len(shown) else "")
