"""The phase protocol: every second and every gigabyte is where it belongs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megarl.core.device import release_freed_memory
from megarl.core.world import Place
from megarl.metrics.meter import Meter
from megarl.metrics.registry import check_meter
from megarl.metrics.schema import Schema
from megarl.run import residency as module
from megarl.run.residency import Residency

MIB = 1 / 1024
MOMENTS = ("start/offload", "start/onload", "end/onload", "end/offload")


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Part:
    """A state that takes its time to come and to go, and memory while it is there."""

    num_bytes = 0

    def __init__(self, move: Callable[[str], None], mebibytes: int = 0) -> None:
        self.resident = False
        self._move = move
        self._mebibytes = mebibytes
        self._memory: torch.Tensor | None = None

    def onload(self) -> None:
        self.resident = True
        self._memory = torch.ones(self._mebibytes, 2**18)
        self._move("onload")

    def offload(self) -> None:
        self.resident = False
        self._memory = None
        self._move("offload")


def numbers(meter: Meter) -> dict[str, float]:
    check_meter(meter)
    schema = Schema({}).extended((name, statistic.kind) for name, statistic in meter.statistics.items())
    return schema.merge(schema.pack(meter.statistics)[None])


def test_moving_in_working_and_moving_out_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    seconds = {"onload": 0.5, "offload": 0.25}

    def move(kind: str) -> None:
        clock.now += seconds[kind]

    parts = {"a.weights": Part(move), "b.weights": Part(move)}
    table = {"actor_train/train_step": frozenset({"a.weights"}), "critic/train_step": frozenset({"b.weights"})}
    residency = Residency(parts, frozenset(), table, torch.device("cpu"))
    meter = Meter()
    with residency.phase("actor_train/train_step", meter):
        clock.now += 3
    clock.now += 10  # between two phases: nobody's
    with residency.phase("critic/train_step", meter):
        clock.now += 1
    residency.settle(["actor_train/train_step"])
    found = numbers(meter)
    for phase, execute in (("actor_train", 3.0), ("critic", 1.0)):
        parts_of_it = [found[f"time/{phase}/train_step/{part}"] for part in ("onload", "execute", "offload", "total")]
        assert parts_of_it == [0.5, execute, 0.25, 0.75 + execute]
    assert [(one.phase, one.part) for one in residency.timeline.take()] == [
        ("actor_train/train_step", "onload"),
        ("actor_train/train_step", "execute"),
        ("actor_train/train_step", "offload"),
        ("critic/train_step", "onload"),
        ("critic/train_step", "execute"),
        ("critic/train_step", "offload"),
    ]


def test_memory_shows_in_its_phase_and_nowhere_else() -> None:
    """A state of 64 MiB comes and goes; 200 MiB are taken and given back inside one phase."""
    parts = {"a.weights": Part(lambda _: None, 64)}
    table = {"a/first": frozenset[str](), "a/second": frozenset({"a.weights"}), "a/third": frozenset[str]()}
    residency = Residency(parts, frozenset(), table, torch.device("cpu"))
    meter = Meter()
    release_freed_memory(torch.device("cpu"))  # what earlier tests freed would be used again, and nothing would grow
    for phase in table:
        with residency.phase(phase, meter):
            if phase == "a/second":
                torch.ones(200, 2**18)
    residency.settle(["a/first"])
    found = numbers(meter)

    def grown(phase: str, moment: str, stat: str) -> float:
        """MiB above what the process had when the phase began."""
        return (found[f"memory/{phase}/{moment}/{stat}/0"] - found[f"memory/{phase}/start/offload/allocated/0"]) / MIB

    # Ten megabytes are the interpreter's own: the kernel counts a process's pages in batches.
    assert grown("a/second", "start/onload", "allocated") == pytest.approx(64, abs=10)
    assert grown("a/second", "end/onload", "max_allocated") == pytest.approx(264, abs=10)
    assert grown("a/second", "end/offload", "allocated") == pytest.approx(0, abs=10)
    assert grown("a/second", "end/offload", "max_allocated") == pytest.approx(264, abs=10)
    for phase in ("a/first", "a/third"):
        for moment in MOMENTS:
            assert grown(phase, moment, "max_allocated") == pytest.approx(0, abs=10)
    peak = found["memory/a/second/end/onload/max_allocated/0"]
    total = peak / found["memory/a/second/end/onload/max_allocated_frac/0"]
    assert peak < total
    assert found["perf/max_memory_allocated_gb"] == pytest.approx(peak, abs=10 * MIB)
    assert found["memory/cpu/a/second/end/rss"] < peak


def test_what_happens_between_two_phases_is_in_neither() -> None:
    residency = Residency({}, frozenset(), {}, torch.device("cpu"))
    meter = Meter()
    with residency.phase("a/first", meter):
        pass
    torch.ones(200, 2**18)
    with residency.phase("a/second", meter):
        pass
    residency.settle([])
    found = numbers(meter)
    for phase in ("a/first", "a/second"):
        peak = found[f"memory/{phase}/end/offload/max_allocated/0"]
        assert peak - found[f"memory/{phase}/start/offload/allocated/0"] < 10 * MIB


def test_a_phase_that_fails_says_so_and_keeps_what_was_measured() -> None:
    residency = Residency({}, frozenset(), {}, torch.device("cpu"))
    meter = Meter()
    with pytest.raises(ZeroDivisionError), residency.phase("a/first", meter):
        raise ZeroDivisionError
    found = numbers(meter)
    assert found["time/a/first/failed"] == 1
    assert found["time/a/first/total"] >= found["time/a/first/execute"] > 0
    assert "memory/a/first/end/onload/max_allocated/0" in found
    with residency.phase("a/second", meter):
        pass
    residency.settle([])
    assert "memory/a/second/end/offload/allocated/0" in numbers(meter)
    assert "time/a/second/failed" not in numbers(meter)


def test_memory_can_be_off_but_not_the_peak_of_the_step() -> None:
    residency = Residency({}, frozenset(), {}, torch.device("cpu"), measures_memory=False)
    meter = Meter()
    with residency.phase("a/first", meter):
        pass
    residency.settle([])
    names = set(numbers(meter))
    assert not any(name.startswith("memory/") for name in names)
    assert {"perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb", "time/a/first/total"} <= names


def test_devices_of_two_nodes_have_numbers_of_their_own() -> None:
    """Sixteen devices on two nodes; one of the first pipeline stage is nearly full, and nobody averages it away."""
    from megarl.core.device_table import number_devices

    places = number_devices(["a"] * 8 + ["b"] * 8, [*range(8), *range(8)])
    assert [place.device for place in places] == list(range(16))
    assert [place.node for place in places] == [0] * 8 + [1] * 8
    # a job that sees only the upper half of each node keeps the physical numbers
    assert [p.device for p in number_devices(["a", "a", "b", "b"], [6, 7, 6, 7])] == [6, 7, 14, 15]
    name = "memory/actor_train/train_step/end/onload/max_allocated"
    host = "memory/cpu/actor_train/train_step/end/rss_node_sum"
    schema = Schema({name: "gauge", host: "node_sum"})
    rows = []
    for rank in range(16):
        meter = Meter()
        meter.gauge(name, 77.8 if rank == 0 else 10.0)
        meter.node_sum(host, 2.0 if rank < 8 else 3.0)
        rows.append(schema.pack(meter.statistics))
    found = schema.merge(np.stack(rows), places)
    assert found[f"{name}/0"] == 77.8
    assert {found[f"{name}/{device}"] for device in range(1, 16)} == {10.0}
    assert found[host] == 24.0


def test_many_ranks_have_percentiles() -> None:
    meters = []
    for rank in range(100):
        meter = Meter()
        meter.span("time/a/first", 0.0, 1.0 + rank, 0.0, 1.0 + rank)
        if rank % 2:
            meter.span("time/a/second", 0.0, 1.0, 0.0, float(rank))
        meters.append(meter)
    schema = Schema({"time/a/first": "span", "time/a/second": "span"})
    rows = np.stack([schema.pack(meter.statistics) for meter in meters])
    found = schema.merge(rows, [Place(rank, 0) for rank in range(100)])
    assert (found["time/a/first/p50"], found["time/a/first/p99"]) == (50.0, 99.0)
    assert (found["time/a/second/p50"], found["time/a/second/p99"]) == (49.0, 99.0)  # of the fifty that were there
    assert "time/a/first/p50" not in schema.merge(rows[:16])
