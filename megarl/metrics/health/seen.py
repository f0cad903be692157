"""The metrics of one step, as rules read them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_EVAL = re.compile(r"eval/.+/score/mean@[0-9]+")
# Times that are not parts of timing_s/step: the step itself, what comes after it, and what is inside another part.
_NOT_PARTS = {"step", "step_wall", "testing", "save_checkpoint", "generate_sequences"}


class OfDevice(NamedTuple):
    """A metric of one device in one phase; ``infix`` is cluster/phase."""

    infix: str
    device: str
    name: str


class Span(NamedTuple):
    """The times of one phase."""

    total: str
    onload: str
    offload: str


class OfEngine(NamedTuple):
    """The mean root of the gaps of one server, and the tokens that it is over."""

    engine: str
    root_gap: str
    num_tokens: str


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a step that follow a pattern, sorted. Found once per set of names, not once per step."""

    step_parts: tuple[str, ...]  # timing_s/{part of the step}
    evals: tuple[str, ...]  # eval/{task}/score/mean@{k}
    spans: tuple[Span, ...]  # time/{infix}/{total,onload,offload}
    resident: tuple[str, ...]  # memory/cpu/{infix}/end/rss
    reserved: tuple[OfDevice, ...]  # memory/{infix}/end/onload/max_reserved_frac/{device}
    left_behind: tuple[OfDevice, ...]  # memory/{infix}/end/offload/allocated/{device}
    engine_gaps: tuple[OfEngine, ...]  # mismatch/engine/{engine}/{root_gap_mean,num_tokens}


def find_names(metrics: Iterable[str]) -> Names:
    """Sort the names of a step into families."""
    step_parts, evals = [], []
    spans, resident = [], []
    reserved, left_behind = [], []
    engine_gaps = []
    for name in sorted(metrics):
        match name.split("/"):
            case ["timing_s", part] if part not in _NOT_PARTS:
                step_parts.append(name)
            case ["eval", *_] if _EVAL.fullmatch(name):
                evals.append(name)
            case ["time", cluster, phase, "total"]:
                prefix = f"time/{cluster}/{phase}"
                spans.append(Span(name, f"{prefix}/onload", f"{prefix}/offload"))
            case ["memory", "cpu", _, _, "end", "rss"]:
                resident.append(name)
            case ["memory", cluster, phase, "end", "onload", "max_reserved_frac", device]:
                reserved.append(OfDevice(f"{cluster}/{phase}", device, name))
            case ["memory", cluster, phase, "end", "offload", "allocated", device]:
                left_behind.append(OfDevice(f"{cluster}/{phase}", device, name))
            case ["mismatch", "engine", engine, "root_gap_mean"]:
                engine_gaps.append(OfEngine(engine, name, f"mismatch/engine/{engine}/num_tokens"))
    return Names(
        tuple(step_parts),
        tuple(evals),
        tuple(spans),
        tuple(resident),
        tuple(reserved),
        tuple(left_behind),
        tuple(engine_gaps),
    )


class Seen:
    """One step. Rules get finite numbers only, so that a NaN cannot spoil what they remember.

    Those that read ``raw`` mean to see NaN, or compare in a way that is False for it.
    """

    __slots__ = ("names", "raw")

    def __init__(self, raw: Mapping[str, float], names: Names) -> None:
        self.raw = raw
        self.names = names

    def get(self, name: str) -> float | None:
        """The metric, or None where the step lacks it or it is not finite."""
        value = self.raw.get(name)
        return value if value is not None and math.isfinite(value) else None

    def all(self, *names: str) -> list[float] | None:
        """Several metrics, or None where one of them is missing."""
        values = [value for name in names if (value := self.get(name)) is not None]
        return values if len(values) == len(names) else None
