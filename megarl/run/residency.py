"""Who is on the device in which phase.

A phase names the parts that it needs; entering it offloads what it does not need, then onloads what is missing. Parts
that are needed again are never moved, and parts of a model with ``offload: false`` never leave. Times and memory of
every phase are recorded always, on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megarl.core.device import peak_memory, process_memory, release_freed_memory, reset_peak_memory, synchronize
from megarl.core.protocols import OffloadPart
from megarl.metrics.meter import Meter


class Residency:
    """The phase table at work.

    ``table`` gives each phase its parts. A phase that is not in the table moves nothing.
    """

    def __init__(
        self,
        parts: Mapping[str, OffloadPart],
        pinned: frozenset[str],
        table: Mapping[str, frozenset[str]],
        device: torch.device,
    ) -> None:
        self._parts = parts
        self._pinned = pinned
        self._table = table
        self._device = device
        self._last_phase: str | None = None

    @contextmanager
    def phase(self, name: str, meter: Meter) -> Iterator[None]:
        """Run the block with the phase's parts on the device.

        What the phase leaves behind is offloaded when the next phase turns out not to need it, and counted as the
        offload time of the phase that left it. An exception leaves parts where they are; the record stays consistent.
        """
        reset_peak_memory(self._device)
        needed = self._table.get(name)
        onload_seconds = self._move(name, needed, meter) if needed is not None else 0.0
        rss, vms = process_memory()
        meter.max(f"memory/cpu/{name}/start/rss", rss)
        meter.max(f"memory/cpu/{name}/start/vms", vms)
        start = time.monotonic()
        try:
            yield
        finally:
            synchronize(self._device)
            meter.span(f"time/{name}", onload_seconds, time.monotonic() - start, 0.0)
            rss, vms = process_memory()
            meter.max(f"memory/cpu/{name}/end/rss", rss)
            meter.max(f"memory/cpu/{name}/end/vms", vms)
            allocated, reserved = peak_memory(self._device)
            meter.max("perf/max_memory_allocated_gb", allocated)
            meter.max("perf/max_memory_reserved_gb", reserved)

    def onload(self, names: Iterable[str]) -> None:
        """For the rare moments between stages that touch several models at once; the next phase tidies up."""
        for name in names:
            if name in self._parts and not self._parts[name].resident:
                self._parts[name].onload()

    def _move(self, phase: str, needed: frozenset[str], meter: Meter) -> float:
        """Offload first, so that the peak is never the sum of both phases. Returns the seconds of onloading."""
        leaving = [part for name, part in self._parts.items() if part.resident and name not in needed | self._pinned]
        coming = [part for name, part in self._parts.items() if not part.resident and name in needed]
        start = time.monotonic()
        for part in leaving:
            part.offload()
        if leaving:
            release_freed_memory(self._device)
            synchronize(self._device)
            if self._last_phase is not None:
                meter.span(f"time/{self._last_phase}", 0.0, 0.0, time.monotonic() - start)
        self._last_phase = phase
        start = time.monotonic()
        for part in coming:
            part.onload()
        synchronize(self._device)
        return time.monotonic() - start
