"""Which of several sources the next prompt comes from."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


class Mixture:
    """An endless stream of source numbers in proportion to weights.

    After any number ``n`` of draws, a source with share ``w`` of all weights was drawn ``w * n`` times, rounded up or
    down: no batch is ever far from the proportions that were asked for. The stream is a pure function of the weights,
    and its only state is how often each source was drawn.

    The rule is that of a scheduler which gives every job its window: draw ``j`` (from 0) of a source is due between
    ``floor(j / w)`` and ``ceil((j + 1) / w)``, and of the draws whose time has come, the one that is due first is made.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        # as the user wrote them: 0.1 is a tenth, not the double next to it
        fractions = [Fraction(repr(weight)) for weight in weights]
        if not fractions or min(fractions) <= 0:
            raise ValueError(f"a mixture needs weights above 0, not {list(weights)}")
        unit = lcm(*(fraction.denominator for fraction in fractions))
        self._shares = [int(fraction * unit) for fraction in fractions]
        self._total = sum(self._shares)
        self._num_drawn = [0] * len(fractions)

    def draw(self) -> int:
        """The number of the next source."""
        now = sum(self._num_drawn)
        _, chosen = min(
            (-(-(drawn + 1) * self._total // share), number)
            for number, (drawn, share) in enumerate(zip(self._num_drawn, self._shares, strict=True))
            if drawn * self._total // share <= now
        )
        self._num_drawn[chosen] += 1
        return chosen

    def state(self) -> list[int]:
        """Plain data for a checkpoint."""
        return list(self._num_drawn)

    def restore(self, state: Sequence[int]) -> None:
        """Go on where `state` was taken; the sources and their weights must be the same."""
        self._num_drawn = [int(count) for count in state]
