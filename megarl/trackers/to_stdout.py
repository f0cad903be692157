"""The console: one line per step in veRL's spelling, made to be read by grep.

``step:5 - training/global_step:5 - training/epoch:0 - critic/score/mean:0.0234375 - ... - timing_s/step:41.01``
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import TextIO

from tqdm import tqdm

from megarl.trackers.views import spell

# Per-device memory and per-phase times are many and rarely read line by line; the ledger has them.
_NOT_ON_THE_CONSOLE = re.compile(r"memory/|time/[^/]+/[^/]+/")
_FIRST = ("training/global_step", "training/epoch")


class ToStdout:
    """Writes each step as one line that starts at column 0 with ``step:``."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one step."""
        self.write(format_step(values, step))

    def write(self, text: str) -> None:
        """Write a text of its own. A reader that went away (``| head``) ends the output, not the run."""
        try:
            # A progress bar in the same terminal steps aside, so that the line is not appended to it.
            with tqdm.external_write_mode(file=self._stream):
                self._stream.write(text + "\n")
                self._stream.flush()
        except BrokenPipeError:
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the rest of the run)

    def finish(self) -> None:
        """Nothing is held back."""


def format_step(values: Mapping[str, float], step: int) -> str:
    """The console line of a step: progress, then scores, then everything else alphabetically."""
    shown = {name: value for name, value in spell(values, "verl").items() if not _NOT_ON_THE_CONSOLE.match(name)}
    fields = [f"{name}:{format_number(shown[name])}" for name in sorted(shown, key=_place)]
    return " - ".join([f"step:{step}", *fields])


def format_number(x: float) -> str:
    """The shortest decimal that reads back as ``x``, without an exponent from 1e-12 up to 1e15.

    Patterns such as ``[0-9.]*`` would cut ``1e-06`` to ``1``, which is a wrong number rather than none.
    """
    if isinstance(x, int):
        return str(x)
    if x == 0 or not 1e-12 <= abs(x) < float("inf"):  # NaN, inf, 0.0 and tiny numbers
        return repr(x)
    exact = Decimal(repr(x))
    if abs(x) >= 1e15:
        return f"{exact.normalize():e}"
    return repr(x) if "e" not in repr(x) else f"{exact:f}"


def _place(name: str) -> tuple[int, str]:
    if name in _FIRST:
        return _FIRST.index(name), name
    return (len(_FIRST) if name.startswith("critic/score/") else len(_FIRST) + 1), name
