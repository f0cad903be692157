"""What every rank did during a few chosen steps."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from megarl.report.series import evenly, is_number, number

MAX_STEPS = 20
MAX_RANKS = 64
KINDS = ("onload", "execute", "offload")
_STEP = re.compile(rb'\s*\{\s*"step"\s*:\s*([0-9]{1,15})\s*,')

# phase, kind, start and seconds
Segment = tuple[str, str, float, float]


def read_timeline(directory: Path) -> list[dict[str, Any]]:
    """At most twenty steps of ``timeline.jsonl``, evenly chosen; none if there is no such file."""
    path = directory / "timeline.jsonl"
    if not path.is_file():
        return []
    with path.open("rb") as file:
        offsets: dict[int, int] = {}
        offset = 0
        for line in file:
            found = _STEP.match(line)
            if found and line.endswith(b"\n"):
                offsets[int(found[1])] = offset  # of a step that was recorded twice, the later record counts
            offset += len(line)
        steps = []
        for step in evenly(sorted(offsets), MAX_STEPS):
            file.seek(offsets[step])
            ranks = _segments_by_rank(file.readline())
            if ranks:
                steps.append({"step": step, "num_ranks": len(ranks), "rows": _rows(ranks)})
    return steps


def _segments_by_rank(line: bytes) -> dict[int, list[Segment]]:
    try:
        segments = json.loads(line)["segments"]
    except (ValueError, KeyError, TypeError):
        return {}
    ranks: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments if isinstance(segments, list) else ():
        if _is_segment(segment):
            rank, phase, kind, start, seconds = segment
            ranks[rank].append((phase, kind, float(start), float(seconds)))
    return dict(sorted(ranks.items()))


def _is_segment(segment: object) -> bool:
    if not isinstance(segment, list) or len(segment) != 5:
        return False
    rank, phase, kind, *times = segment
    are_times = all(is_number(time) for time in times)
    return isinstance(rank, int) and isinstance(phase, str) and kind in KINDS and are_times and times[1] >= 0


def _rows(ranks: dict[int, list[Segment]]) -> list[dict[str, Any]]:
    """One row per rank; of many ranks the slowest, median and fastest one (by seconds at work) and all of them."""
    if len(ranks) <= MAX_RANKS:
        return [_row(f"rank {rank}", segments) for rank, segments in ranks.items()]
    by_work = sorted(ranks, key=lambda rank: sum(s for _, kind, _, s in ranks[rank] if kind == "execute"))
    chosen = {"slowest": by_work[-1], "median": by_work[len(by_work) // 2], "fastest": by_work[0]}
    rows = [_row(f"{label}: rank {rank}", ranks[rank]) for label, rank in chosen.items()]
    return [*rows, _row(f"mean of {len(ranks)} ranks", _mean_segments(ranks))]


def _mean_segments(ranks: dict[int, list[Segment]]) -> list[Segment]:
    """The n-th segment of each phase and kind, averaged over the ranks that have one."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for segments in ranks.values():
        counts: dict[tuple[str, str], int] = defaultdict(int)
        for phase, kind, start, seconds in segments:
            found[phase, kind, counts[phase, kind]].append((start, seconds))
            counts[phase, kind] += 1
    return [(phase, kind, *np.mean(times, axis=0).tolist()) for (phase, kind, _), times in found.items()]


def _row(label: str, segments: list[Segment]) -> dict[str, Any]:
    ordered = sorted(segments, key=lambda segment: segment[2])
    return {"label": label, "segments": [[p, KINDS.index(k), number(start), number(s)] for p, k, start, s in ordered]}
