"""Is it as fast as it was, and will it survive? H11 to H14, H22, H23, H25 and H26: times, memory, bad numbers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import ClassVar

from megarl.metrics.health.alert import Severity
from megarl.metrics.health.rule import FINE, Finding, Rule, above, number
from megarl.metrics.health.seen import OfDevice, Seen
from megarl.metrics.health.windows import Early, halves_differ_by, robust_slope, slope

STEP = "timing_s/step"
_SLOPE_STEPS = 50
_LAST_STEPS = 10
_LEAK_STEPS = 200
_MAX_NAMED = 3


class _Pace:
    """How long a part of the step took early (steps 5 to 15) and lately (the last 10)."""

    def __init__(self) -> None:
        self._early = Early(5, 15)
        self._last: deque[float] = deque(maxlen=_LAST_STEPS)

    def push(self, seconds: float) -> None:
        self._early.push(seconds)
        self._last.append(seconds)

    @property
    def medians(self) -> tuple[float, float]:
        """Early and late seconds; equal while there is nothing to compare."""
        late = median(self._last)
        return (late if self._early.median is None else self._early.median), late

    @property
    def growth(self) -> float:
        """Seconds that were added since."""
        early, late = self.medians
        return late - early


class H11StepsGetSlower(Rule):
    """Steps take longer than early ones, or longer and longer; the part that grew most is named."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._step = _Pace()
        self._parts: dict[str, _Pace] = {}
        self._window: deque[float] = deque(maxlen=_SLOPE_STEPS)

    def judge(self, seen: Seen) -> Finding | None:
        seconds = seen.get(STEP)
        if seconds is None:
            return None
        self._step.push(seconds)
        self._window.append(seconds)
        for name in seen.names.step_parts:
            if (of_part := seen.get(name)) is not None:
                self._parts.setdefault(name, _Pace()).push(of_part)
        early, late = self._step.medians
        if late - early < self.limits["floor"]:
            return FINE
        if late > self.limits["warn"] * early:
            times = f"above {number(self.limits['warn'])} times the early {number(early)}"
            return Finding(Severity.WARN, f"{STEP} is {number(late)}, {times}{self._culprit()}")
        per_step = self._growth_per_step()
        if per_step > self.limits["slope"]:
            return Finding(Severity.WARN, f"{STEP} grows by {per_step:.2%} per step{self._culprit()}")
        return FINE

    def _growth_per_step(self) -> float:
        """As a share of the median. The pairs of the robust slope are only gone through where it may be too steep."""
        usual = median(self._window)
        if len(self._window) < _SLOPE_STEPS or usual <= 0:  # a clock that does not move measures nothing
            return 0.0
        least = self.limits["slope"] * usual * _SLOPE_STEPS / 2
        return robust_slope(self._window) / usual if halves_differ_by(self._window) > least / 2 else 0.0

    def _culprit(self) -> str:
        name = max(self._parts, key=lambda name: self._parts[name].growth, default="")
        if not name:
            return ""
        early, late = self._parts[name].medians
        return f", most of all {name} (from {number(early)} to {number(late)})"


class H12OnePhaseDominates(Rule):
    """One part takes most of the step. A step that does not generate has only one part worth naming."""

    def judge(self, seen: Seen) -> Finding | None:
        seconds = seen.get(STEP)
        if not seconds or "timing_s/gen" not in seen.raw:
            return None
        name = max(seen.names.step_parts, key=lambda name: seen.get(name) or 0.0)
        share = (seen.get(name) or 0.0) / seconds
        if share <= self.limits["info"]:
            return FINE
        return Finding(Severity.INFO, f"{name} is {share:.0%} of {STEP}, above {self.limits['info']:.0%}")


class H13MemoryIsFull(Rule):
    """A device is nearly full by what its allocator has taken (reserved), which is what runs out."""

    def judge(self, seen: Seen) -> Finding | None:
        retries = seen.get("perf/allocator_retries")
        if not seen.names.reserved and retries is None:
            return None
        least = min(self.limits.values())
        full = [one for one in seen.names.reserved if seen.raw[one.name] > least]
        if full:
            worst = max(full, key=lambda one: seen.raw[one.name])
            found = above(worst.name, seen.raw[worst.name], self.limits)
            return found._replace(text=f"{found.text} on device {worst.device} in {worst.infix}")
        if retries:
            return Finding(Severity.WARN, f"perf/allocator_retries is {number(retries)}")
        return FINE


class H14NotFinite(Rule):
    """Some metric is NaN or infinite."""

    def judge(self, seen: Seen) -> Finding | None:
        if math.isfinite(sum(seen.raw.values())):  # one bad number makes the sum bad
            return FINE
        bad = sorted(name for name, value in seen.raw.items() if not math.isfinite(value))
        if not bad:
            return FINE
        more = f" and {len(bad) - _MAX_NAMED} more" if len(bad) > _MAX_NAMED else ""
        shown = ", ".join(f"{name} = {seen.raw[name]}" for name in bad[:_MAX_NAMED])
        return Finding(Severity.CRITICAL, f"not finite: {shown}{more}")


class H22EfficiencyDropped(Rule):
    """Fewer tokens or operations per second than early in the stage."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._early = {name: Early(5, 15) for name in ("perf/mfu/actor", "perf/throughput")}

    def judge(self, seen: Seen) -> Finding | None:
        found = [self._judge_one(name, value) for name in self._early if (value := seen.get(name)) is not None]
        return max(found, default=None)

    def _judge_one(self, name: str, value: float) -> Finding:
        early = self._early[name]
        early.push(value)
        if early.median is None or value >= self.limits["warn"] * early.median:
            return FINE
        share = f"below {number(self.limits['warn'])} of the early {number(early.median)}"
        return Finding(Severity.WARN, f"{name} is {number(value)}, {share}")


class H23MovingDominates(Rule):
    """A phase spends much of its time on moving states to the device and off it."""

    def judge(self, seen: Seen) -> Finding | None:
        found = []
        for span in seen.names.spans:
            times = seen.all(*span)
            if times is not None:
                found.append((self._share(*times), span))
        if not found:
            return None
        share, span = max(found)
        if share <= self.limits["info"]:
            return FINE
        text = f"{span.onload} and offload are {share:.0%} of the phase, above {self.limits['info']:.0%}"
        return Finding(Severity.INFO, text)

    def _share(self, total: float, onload: float, offload: float) -> float:
        """0 for a phase that is too short to matter."""
        return (onload + offload) / total if total > 0 and total >= self.limits["min_seconds"] else 0.0


class H25HostMemoryGrows(Rule):
    """A process leaks, or a host is nearly full."""

    per_stage: ClassVar[bool] = False

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._resident: dict[str, deque[float]] = {}

    def judge(self, seen: Seen) -> Finding | None:
        grown = 0.0
        where = ""
        for name in seen.names.resident:
            resident = seen.get(name)
            if resident is not None and (per_100_steps := self._growth(name, resident)) > grown:
                grown, where = per_100_steps, name
        host = seen.get("perf/cpu_memory_used_frac")
        if not seen.names.resident and host is None:
            return None
        if grown > self.limits["warn"]:
            text = f"{where} grows by {number(grown)} GiB per 100 steps, above {number(self.limits['warn'])}"
            return Finding(Severity.WARN, text)
        if host is not None and host > self.limits["host"]:
            return Finding(Severity.WARN, f"perf/cpu_memory_used_frac is {host:.0%}, above {self.limits['host']:.0%}")
        return FINE

    def _growth(self, name: str, resident: float) -> float:
        window = self._resident.setdefault(name, deque(maxlen=_LEAK_STEPS))
        window.append(resident)
        # Such a leak adds twice the limit over the window. Where the ends differ by less than half of that, the fit is
        # not worth its time.
        if len(window) < _LEAK_STEPS or window[-1] - window[0] < self.limits["warn"]:
            return 0.0
        return 100 * slope(window)


class H26LeftOnDevice(Rule):
    """A phase moved states off the device, and yet more than a little stayed. Made only where allocators are read."""

    def judge(self, seen: Seen) -> Finding | None:
        if not seen.names.left_behind:
            return None
        # Steps have a figure per phase and device, and nearly all of them are small: the others are looked at closely.
        large = [one for one in seen.names.left_behind if seen.raw[one.name] > self.limits["warn"]]
        left, name = max((self._left(seen, one) for one in large), default=(0.0, ""))
        if not left:
            return FINE
        return Finding(Severity.WARN, f"{name} is {number(left)} GiB, above {number(self.limits['warn'])}")

    def _left(self, seen: Seen, one: OfDevice) -> tuple[float, str]:
        """What stayed and where; nothing if the phase did not mean to take anything off."""
        found = seen.all(one.name, f"memory/{one.infix}/end/onload/allocated/{one.device}")
        if found is None:
            return 0.0, ""
        left, held = found
        return (left, one.name) if held - left >= self.limits["moved"] * held else (0.0, "")
