"""From meters to records: derived numbers, alerts, the ledger, the console line, the progress bar."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from megarl.core.device import host_memory_used
from megarl.core.errors import DataError
from megarl.core.world import World
from megarl.metrics.health.alert import Alert, format_alert
from megarl.metrics.health.health import Health
from megarl.metrics.meter import Meter
from megarl.metrics.reduce import reduce_to_driver
from megarl.metrics.throughput import Derivation, TokenRate
from megarl.run.stage import Stage
from megarl.run.summary import History
from megarl.trackers.followers import Followers
from megarl.trackers.ledger import Ledger, StepRecord
from megarl.trackers.progress_bar import ProgressBar
from megarl.trackers.to_stdout import ToStdout

_PARTS_OF_A_PHASE = re.compile(r"time/[^/]+/[^/]+/(execute|onload|offload)")


@dataclass(frozen=True, slots=True)
class Desk:
    """What the driver records with; other ranks have none."""

    console: ToStdout
    ledger: Ledger
    history: History
    derivation: Derivation
    health: Health
    # whether the parts of a phase's time are recorded, or only its total
    splits_phases: bool = True


class Recorder:
    """Reduces every step's meter to the driver and records it there. Other ranks only take part in the reduction."""

    def __init__(self, desk: Desk | None) -> None:
        self._desk = desk
        self._progress = ProgressBar()
        self._rate = TokenRate()
        self.num_samples = 0.0
        self.num_tokens = 0.0
        self._followers: Followers | None = None
        # the metrics of the last step, on the driver
        self.latest: dict[str, float] = {}

    def attach(self, followers: Followers) -> None:
        """Tell the trackers of every step, after the ledger has it."""
        self._followers = followers

    def resume(self, records: Iterable[StepRecord]) -> None:
        """Go on after steps that are in the ledger, and in the history, already."""
        for record in records:
            if record.step > 0:
                self._push_rate(record.metrics)
            if self._desk is not None:
                self._desk.health.check(record.step, record.metrics)

    def start(self, num_steps: int, num_done: int) -> None:
        """Show the progress bar; on the driver only."""
        if self._desk is not None:
            self._progress.start(num_steps, num_done)

    def sync(self) -> int:
        """Put the ledger on the disk; its bytes, 0 on ranks that have none."""
        return self._desk.ledger.sync() if self._desk is not None else 0

    def announce(self, text: str) -> None:
        """A line for the person at the console; only the driver has one."""
        if self._desk is not None:
            self._desk.console.write(text)

    def record_opening(self, meter: Meter, world: World) -> None:
        """Step 0: the evaluation before training, if there was one. Collective."""
        metrics = reduce_to_driver(meter, world)
        if metrics and self._desk is not None:
            metrics = {"training/global_step": 0, "training/epoch": 0} | metrics
            self._log(self._desk, metrics, 0, "opening")

    def record(self, step: int, stage: Stage, meter: Meter, world: World) -> None:
        """One training step. Collective. An alert that is fatal ends the run, once it is recorded."""
        used, share = host_memory_used()
        meter.max("perf/cpu_memory_used_gb", used)
        meter.max("perf/cpu_memory_used_frac", share)
        metrics = reduce_to_driver(meter, world)
        if metrics is None or self._desk is None:
            return
        self.num_samples += metrics.get("experience_pipeline/experience_count", 0)
        self.num_tokens += metrics.get("perf/total_num_tokens", 0)
        metrics |= self._desk.derivation.derive(metrics, stage.algorithm.num_epochs)
        rate = self._push_rate(metrics)
        if rate is not None:
            metrics |= {"system/tps": rate, "system/tps_gpu": rate / world.size}
        metrics |= {
            "training/global_step": step,
            "training/epoch": stage.rollouts.epoch,
            "system/samples": self.num_samples,
            "system/tokens_total": self.num_tokens,
        }
        self.latest = metrics
        alerts = self._log(self._desk, metrics, step, stage.name)
        self._progress.advance(_highlights(metrics))
        fatal = self._desk.health.fatal(alerts)
        if fatal is not None:
            raise DataError(
                "MRL-3003",
                f"step {step} raised {fatal.rule}, and alerts.fatal lists it: {fatal.message}\n"
                "The last checkpoint is from before the step. Mend the cause, or take the rule out of alerts.fatal, "
                "and run the same command to go on from it.",
            )

    def finish(self) -> None:
        """Close the progress bar and the ledger, then give the trackers the time that they need."""
        self._progress.close()
        if self._desk is not None:
            self._desk.ledger.finish()
        if self._followers is not None:
            self._followers.finish()

    def _push_rate(self, metrics: Mapping[str, float]) -> float | None:
        return self._rate.push(metrics.get("perf/total_num_tokens", 0), metrics["timing_s/step_wall"])

    def _log(self, desk: Desk, metrics: dict[str, float], step: int, stage: str) -> list[Alert]:
        """The ledger comes first: everything else can be made from it again."""
        alerts = desk.health.check(step, metrics)
        metrics = metrics | desk.health.levels
        if not desk.splits_phases:
            metrics = {name: value for name, value in metrics.items() if not _PARTS_OF_A_PHASE.fullmatch(name)}
        desk.ledger.log(metrics, step, [asdict(alert) for alert in alerts])
        if self._followers is not None:
            self._followers.log(metrics, step)
        desk.console.log(metrics, step)
        for alert in alerts:
            desk.console.write(format_alert(alert, step))
        desk.history.add(step, stage, metrics)
        return alerts


def _highlights(metrics: dict[str, float]) -> dict[str, float]:
    """The few numbers that fit behind a progress bar."""
    wanted = {"score": metrics.get("critic/score/mean"), "loss": metrics.get("actor/sft_loss")}
    return {name: value for name, value in wanted.items() if value is not None and math.isfinite(value)}
