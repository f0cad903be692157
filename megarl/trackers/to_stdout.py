"""The console: one line per step in veRL's spelling, made for grep, or in ROLL's, made for programs.

``step:5 - training/global_step:5 - training/epoch:0 - critic/score/mean:0.0234375 - ... - timing_s/step:41.01``
``metrics_tag: {"step": 5, "metrics": {"critic/score/mean": 0.0234375, ...}}``
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TextIO

from tqdm import tqdm

from megarl.config.measuring import MetricsSettings
from megarl.config.schema import RunConfig
from megarl.trackers.json_numbers import number_for_json
from megarl.trackers.sinks import spelling_for
from megarl.trackers.views import Spelling

logger = logging.getLogger(__name__)

StepLine = Callable[[Mapping[str, float], int], str]
_FIRST = ("training/global_step", "training/epoch")


class NameFilter:
    """Which metrics are on the console: ``*`` stands for a part of a name, ``**`` for any number of parts."""

    def __init__(self, include: Sequence[str], exclude: Sequence[str]) -> None:
        self._include = [_pattern(glob) for glob in include]
        self._exclude = [_pattern(glob) for glob in exclude]

    def lets_through(self, name: str) -> bool:
        """Whether the metric is shown."""
        return any(p.match(name) for p in self._include) and not any(p.match(name) for p in self._exclude)


def _pattern(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", glob)
    meaning = {"*": "[^/]*", "**": ".*"}
    return re.compile("".join(meaning.get(part, re.escape(part)) for part in parts) + r"\Z")


_DEFAULTS = MetricsSettings()
_VERL = Spelling(["verl"])
_USUAL = NameFilter(_DEFAULTS.console_include, _DEFAULTS.console_exclude)


def console_for(config: RunConfig) -> ToStdout:
    """The console as ``track_with`` wants it: without any tracker it has no lines for steps, only announcements."""
    lines: list[StepLine] = []
    if "stdout" in config.track_with or (config.track_with and "stdout_json" not in config.track_with):
        spelling = spelling_for(config, "console")
        names = NameFilter(config.metrics.console_include, config.metrics.console_exclude)
        lines.append(lambda values, step: format_step(values, step, spelling, names))
    if "stdout_json" in config.track_with:
        spelling_json = spelling_for(config, "stdout_json")
        lines.append(lambda values, step: format_json(values, step, spelling_json))
    return ToStdout(lines=lines)


class ToStdout:
    """Writes each step as lines of its own, which start at column 0."""

    def __init__(self, stream: TextIO | None = None, lines: Sequence[StepLine] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._lines: Sequence[StepLine] = (format_step,) if lines is None else lines

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one step."""
        for line in self._lines:
            self.write(line(values, step))

    def write(self, text: str) -> None:
        """Write a text of its own. A reader that went away (``| head``) or a full disk ends the output, not the run."""
        try:
            # A progress bar in the same terminal steps aside, so that the line is not appended to it.
            with tqdm.external_write_mode(file=self._stream):
                self._stream.write(text + "\n")
                self._stream.flush()
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                logger.warning("The console cannot be written (%s). The run goes on; see its ledger.", error.strerror)
            self._stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (for the rest of the run)

    def finish(self) -> None:
        """Nothing is held back."""


def format_step(values: Mapping[str, float], step: int, spelling: Spelling = _VERL, names: NameFilter = _USUAL) -> str:
    """The console line of a step: progress, then scores, then everything else alphabetically."""
    shown = {name: value for name, value in spelling.spell(values).items() if names.lets_through(name)}
    fields = [f"{name}:{format_number(shown[name])}" for name in sorted(shown, key=_place)]
    return " - ".join([f"step:{step}", *fields])


def format_json(values: Mapping[str, float], step: int, spelling: Spelling) -> str:
    """ROLL's form: a marker, then JSON that any reader accepts."""
    metrics = {name: number_for_json(value) for name, value in spelling.spell(values).items()}
    return "metrics_tag: " + json.dumps({"step": step, "metrics": metrics}, allow_nan=False)


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
