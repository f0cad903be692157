"""From meters to records: derived numbers, the ledger, the console line, the progress bar."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import psutil

from megarl.core.device import GIB
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.metrics.reduce import reduce_to_driver
from megarl.metrics.throughput import TokenRate, derive
from megarl.run.stage import Stage
from megarl.run.summary import History
from megarl.trackers.ledger import Ledger, StepRecord
from megarl.trackers.progress_bar import ProgressBar
from megarl.trackers.to_stdout import ToStdout


class Tracker(Protocol):
    """Somewhere metrics go."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Take one step's metrics."""

    def finish(self) -> None:
        """Take no more."""


class Recorder:
    """Reduces every step's meter to the driver and records it there. Other ranks only take part in the reduction."""

    def __init__(self, console: ToStdout | None, ledger: Ledger | None, history: History) -> None:
        self._console = console
        self._ledger = ledger
        trackers: list[Tracker | None] = [console, ledger]
        self._trackers = [tracker for tracker in trackers if tracker is not None]
        self._progress = ProgressBar()
        self._history = history
        self._rate = TokenRate()
        self.num_samples = 0.0
        # the metrics of the last step, on the driver
        self.latest: dict[str, float] = {}

    def attach(self, tracker: Tracker) -> None:
        """Tell one more tracker of every step, after the ledger has it."""
        self._trackers.append(tracker)

    def resume(self, records: Iterable[StepRecord]) -> None:
        """Go on after steps that are in the ledger, and in the history, already."""
        for record in records:
            if record.step > 0:
                self._push_rate(record.metrics)

    def start(self, num_steps: int, num_done: int) -> None:
        """Show the progress bar; on the driver only."""
        if self._console is not None:
            self._progress.start(num_steps, num_done)

    def sync(self) -> int:
        """Put the ledger on the disk; its bytes, 0 on ranks that have none."""
        return self._ledger.sync() if self._ledger is not None else 0

    def announce(self, text: str) -> None:
        """A line for the person at the console; only the driver has one."""
        if self._console is not None:
            self._console.write(text)

    def record_opening(self, meter: Meter, world: World) -> None:
        """Step 0: the evaluation before training, if there was one. Collective."""
        metrics = reduce_to_driver(meter, world)
        if metrics:
            metrics = {"training/global_step": 0, "training/epoch": 0} | metrics
            self._log(metrics, 0)
            self._history.add(0, "opening", metrics)

    def record(self, step: int, stage: Stage, meter: Meter, world: World) -> None:
        """One training step. Collective."""
        metrics = reduce_to_driver(meter, world)
        if metrics is None:
            return
        self.num_samples += metrics.get("experience_pipeline/experience_count", 0)
        metrics |= derive(metrics, world.size)
        rate = self._push_rate(metrics)
        if rate is not None:
            metrics["system/tps"] = rate
        metrics |= {
            "training/global_step": step,
            "training/epoch": stage.rollouts.epoch,
            "system/samples": self.num_samples,
            "perf/cpu_memory_used_gb": psutil.virtual_memory().used / GIB,
        }
        self.latest = metrics
        self._log(metrics, step)
        self._history.add(step, stage.name, metrics)
        self._progress.advance(_highlights(metrics))

    def finish(self) -> None:
        """Close the progress bar and the trackers."""
        self._progress.close()
        for tracker in self._trackers:
            tracker.finish()

    def _push_rate(self, metrics: Mapping[str, float]) -> float | None:
        return self._rate.push(metrics.get("perf/total_num_tokens", 0), metrics["timing_s/step_wall"])

    def _log(self, metrics: dict[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(metrics, step)


def _highlights(metrics: dict[str, float]) -> dict[str, float]:
    """The few numbers that fit behind a progress bar."""
    wanted = {"score": metrics.get("critic/score/mean"), "loss": metrics.get("actor/sft_loss")}
    return {name: value for name, value in wanted.items() if value is not None and math.isfinite(value)}
