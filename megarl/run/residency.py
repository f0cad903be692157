"""Who is on the device in which phase, how long everything took, and how much memory it needed.

A phase names the parts that it needs; entering it offloads what it does not need, then onloads what is missing. Parts
that are needed again are never moved, and parts of a model with ``offload: false`` never leave. Times and memory of
every phase are recorded always, on every rank:

    enter        offload what the phase before left       -> its ``offload`` seconds, its ``end/offload`` memory
                 peaks start anew                         -> ``start/offload`` memory
                 onload what is missing                   -> ``onload`` seconds, ``start/onload`` memory
    the work                                              -> ``execute`` seconds, ``end/onload`` memory
    settle       at the end of a step, the last phase is closed in the same way

Readings are taken between the clocks, never inside them, and the device is synchronised before each. Peaks are those
since the phase began, and what happens between two phases is in neither's: a phase's memory is nobody else's. A phase
after which nothing leaves ends as its work ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megarl.core import whereabouts
from megarl.core.device import (
    MemoryReading,
    device_memory,
    process_memory,
    read_memory,
    release_freed_memory,
    reset_peak_memory,
    synchronize,
)
from megarl.core.protocols import OffloadPart
from megarl.metrics.meter import Meter
from megarl.run.timeline import Timeline


@dataclass(slots=True)
class _Visit:
    """One pass through a phase that still has to be left."""

    phase: str
    meter: Meter
    started: float
    onload: float = 0.0
    execute: float = 0.0
    # when the work and its reading were over; what lies between this and the offload is not the phase's
    ended: float = 0.0
    # peaks so far; the kernel's own high-water mark may waver by a few pages
    max_allocated: float = 0.0
    max_reserved: float = 0.0
    num_retries: int | None = None
    # how memory was when the work was over: (of the device, (rss, vms) of the process)
    last_seen: tuple[MemoryReading, tuple[float, float]] | None = None


class Residency:
    """The phase table at work.

    ``table`` gives each phase its parts. A phase that is not in the table moves nothing. ``measures_memory``: readings
    around every phase; the step's peak is measured in any case.
    """

    def __init__(
        self,
        parts: Mapping[str, OffloadPart],
        pinned: frozenset[str],
        table: Mapping[str, frozenset[str]],
        device: torch.device,
        *,
        measures_memory: bool = True,
    ) -> None:
        self._parts = parts
        self._pinned = pinned
        self._table = table
        self._device = device
        self._measures_memory = measures_memory
        self._total_memory = device_memory(device)
        self._last: _Visit | None = None
        self.timeline = Timeline()

    @contextmanager
    def phase(self, name: str, meter: Meter) -> Iterator[None]:
        """Run the block with the phase's parts on the device. Phases do not nest.

        An exception leaves parts where they are; what was measured so far is recorded, and that the phase failed.
        """
        whereabouts.enter(name)
        needed = self._table.get(name)
        entered = time.monotonic()
        closes_another = self._last is not None
        self._leave(needed)
        # What has to be moved out of the way is the business of the phase that left it, if there is one.
        visit = _Visit(name, meter, time.monotonic() if closes_another else entered)
        reset_peak_memory(self._device)
        self._report(visit, "start/offload", read_memory(self._device))
        self._report_process(visit, "start", process_memory())
        try:
            visit.onload = self._bring(visit, needed or frozenset())
            self._report(visit, "start/onload", read_memory(self._device))
            start = time.monotonic()
            try:
                yield
            finally:
                synchronize(self._device)
                visit.execute = self._clocked(visit, "execute", start)
        except BaseException:
            meter.sum(f"time/{name}/failed", 1)
            self._record(visit, 0.0)
            raise
        finally:
            visit.last_seen = read_memory(self._device), process_memory()
            self._report(visit, "end/onload", visit.last_seen[0])
        visit.ended = time.monotonic()
        self._last = visit
        whereabouts.tick()

    def settle(self, next_phases: Iterable[str]) -> None:
        """Close the last phase of a step, so that all of it is in the step's own record.

        What none of the phases that may come next needs leaves the device now; it would leave at their beginning. With
        no phase to come that is in the table, nothing moves.
        """
        known = [self._table[phase] for phase in next_phases if phase in self._table]
        self._leave(frozenset().union(*known) if known else None)

    def onload(self, names: Iterable[str]) -> None:
        """For the rare moments between stages that touch several models at once; the next phase tidies up."""
        for name in names:
            if name in self._parts and not self._parts[name].resident:
                self._parts[name].onload()

    def _leave(self, needed: frozenset[str] | None) -> None:
        """Offload what is not needed, before anything else is onloaded: the peak is never the sum of two phases."""
        leaving = []
        if needed is not None:
            keep = needed | self._pinned
            leaving = [part for name, part in self._parts.items() if part.resident and name not in keep]
        visit, self._last = self._last, None
        synchronize(self._device)
        if leaving:
            reset_peak_memory(self._device)  # what happened since the work is not the phase's
        start = time.monotonic()
        for part in leaving:
            part.offload()
        if leaving:
            release_freed_memory(self._device)
            synchronize(self._device)
        if visit is None:
            return
        self._record(visit, self._clocked(visit, "offload", start) if leaving else 0.0)
        if leaving:
            visit.last_seen = read_memory(self._device), process_memory()
        assert visit.last_seen is not None, "a visit that is left has been finished"
        self._report(visit, "end/offload", visit.last_seen[0])
        self._report_process(visit, "end", visit.last_seen[1])

    def _bring(self, visit: _Visit, needed: frozenset[str]) -> float:
        coming = [part for name, part in self._parts.items() if not part.resident and name in needed]
        start = time.monotonic()
        for part in coming:
            part.onload()
        synchronize(self._device)
        return self._clocked(visit, "onload", start) if coming else 0.0

    def _clocked(self, visit: _Visit, part: str, start: float) -> float:
        seconds = time.monotonic() - start
        self.timeline.add(visit.phase, part, start, seconds)
        return seconds

    def _record(self, visit: _Visit, offload: float) -> None:
        inside = (visit.ended or time.monotonic()) - visit.started
        visit.meter.span(f"time/{visit.phase}", visit.onload, visit.execute, offload, inside + offload)

    def _report(self, visit: _Visit, moment: str, reading: MemoryReading) -> None:
        """A reading of the device. The peaks at the end of the work, or of the offload, are the step's too."""
        visit.max_allocated = max(visit.max_allocated, reading.max_allocated)
        visit.max_reserved = max(visit.max_reserved, reading.max_reserved)
        meter, prefix = visit.meter, f"memory/{visit.phase}/{moment}"
        if visit.num_retries is not None and reading.num_retries is not None:
            meter.sum("perf/allocator_retries", reading.num_retries - visit.num_retries)
        visit.num_retries = reading.num_retries
        if moment.startswith("end/"):
            meter.max("perf/max_memory_allocated_gb", visit.max_allocated)
            meter.max("perf/max_memory_reserved_gb", visit.max_reserved)
        if not self._measures_memory:
            return
        meter.gauge(f"{prefix}/allocated", reading.allocated)
        meter.gauge(f"{prefix}/reserved", reading.reserved)
        meter.gauge(f"{prefix}/max_allocated", visit.max_allocated)
        meter.gauge(f"{prefix}/max_reserved", visit.max_reserved)
        if reading.device_used is not None:
            meter.gauge(f"{prefix}/device_used", reading.device_used)
        if moment == "end/onload":
            meter.gauge(f"{prefix}/max_allocated_frac", visit.max_allocated / self._total_memory)
            meter.gauge(f"{prefix}/max_reserved_frac", visit.max_reserved / self._total_memory)

    def _report_process(self, visit: _Visit, moment: str, reading: tuple[float, float]) -> None:
        if self._measures_memory:
            rss, vms = reading
            prefix = f"memory/cpu/{visit.phase}/{moment}"
            visit.meter.max(f"{prefix}/rss", rss)
            visit.meter.max(f"{prefix}/vms", vms)
            visit.meter.node_sum(f"{prefix}/rss_node_sum", rss)
