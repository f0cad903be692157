"""How far the run is: a live bar in a terminal, one line per step in a log file."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import NoReturn, TextIO

from tqdm import tqdm

_DESCRIPTION = "Training Progress"


class ProgressBar:
    """``Training Progress:  17%|#6        | 10/60 [00:12<01:27,  1.76s/it, score=0.5]`` on stderr.

    Carriage returns would glue all updates into one line of a log file, so a stream that is not a terminal gets each
    update as a line of its own; in plain ASCII, because in the C locale grep takes other bytes for a binary file.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bar: tqdm[NoReturn] | None = None
        self._total = self._initial = self._done = 0
        self._start = 0.0

    def start(self, total: int, initial: int) -> None:
        """Begin with ``initial`` of ``total`` steps already made."""
        self._total, self._initial, self._done = total, initial, initial
        self._start = time.monotonic()
        if _is_screen(self._stream):
            self._bar = tqdm(
                total=total,
                initial=initial,
                desc=_DESCRIPTION,
                file=self._stream,
                dynamic_ncols=True,
                mininterval=0,  # updates are as rare as steps: show each
            )

    def advance(self, postfix: Mapping[str, float] | None = None) -> None:
        """One more step is made. A reader that went away ends the display, not the run."""
        self._done += 1
        try:
            self._show(postfix or {})
        except OSError:  # or the disk is full
            self._stream, self._bar = open(os.devnull, "w", encoding="utf-8"), None  # noqa: SIM115

    def _show(self, postfix: Mapping[str, float]) -> None:
        if self._bar is not None:
            if postfix:
                self._bar.set_postfix(dict(postfix), refresh=False)
            self._bar.update()
            return
        line = tqdm.format_meter(
            self._done,
            self._total,
            time.monotonic() - self._start,
            ascii=True,
            prefix=_DESCRIPTION,
            initial=self._initial,
            postfix=", ".join(f"{key}={tqdm.format_num(value)}" for key, value in postfix.items()),
        )
        self._stream.write(line + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._bar is not None:
            self._bar.close()


def _is_screen(stream: TextIO) -> bool:
    # Terminals of containers may claim to have no columns; a live bar would be invisible there.
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0
