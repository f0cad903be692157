"""When this rank did what within a step: the data of a picture with one row per rank.

Every rank keeps the segments of its own step; of a few steps they are gathered and written down.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import NamedTuple

from megarl.core.world import World

logger = logging.getLogger(__name__)

# All of the first steps, then one in so many: a step of 64 ranks with ten phases takes 40 kB.
_FIRST_STEPS = 2
_EVERY = 10


def is_kept(step: int, last_step: int) -> bool:
    """Whether a step is one of those of which more is kept than its metrics: its timeline, some of its samples."""
    return step <= _FIRST_STEPS or step % _EVERY == 0 or step == last_step


class Segment(NamedTuple):
    """``part`` is onload, execute or offload. ``start`` is in seconds since the step began on this rank."""

    phase: str
    part: str
    start: float
    seconds: float


class Timeline:
    """The segments of the step that is running."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._segments: list[Segment] = []

    def add(self, phase: str, part: str, start: float, seconds: float) -> None:
        """One stretch of time, which began at ``start`` on the monotonic clock."""
        self._segments.append(Segment(phase, part, start - self._began, seconds))

    def take(self) -> list[Segment]:
        """The step's segments. The next step begins now: all ranks call this when they have just met."""
        taken, self._segments = self._segments, []
        self._began = time.monotonic()
        return taken


class Timelines:
    """``timeline.jsonl``: of some steps, the segments of all ranks. A step that is made again is written again."""

    def __init__(self, timeline: Timeline, path: Path, last_step: int, world: World) -> None:
        self._timeline = timeline
        self._path = path
        self._last_step = last_step
        self._world = world
        self._has_warned = False

    def keep(self, step: int) -> None:
        """The step is over; write its timeline if it is one of those that are kept. Collective."""
        segments = self._timeline.take()
        if not is_kept(step, self._last_step):
            return
        rounded = [[one.phase, one.part, round(one.start, 6), round(one.seconds, 6)] for one in segments]
        ranks = self._world.gather(rounded)
        if ranks is not None:
            rows = [[rank, *segment] for rank, own in enumerate(ranks) for segment in own]
            line = json.dumps({"step": step, "segments": rows}, separators=(",", ":"))
            try:
                with self._path.open("a", encoding="ascii") as file:
                    file.write(line + "\n")
            except OSError as error:  # it is for people to look at; the run can do without
                if not self._has_warned:
                    logger.warning("%s cannot be written (%s). The run goes on.", self._path, error.strerror)
                self._has_warned = True
