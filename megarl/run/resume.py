"""Going on with a run: is there something to go on from, may this configuration do so, and what is its record?"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.checkpoint.directory import steps_present
from megarl.checkpoint.store import Checkpoint, open_checkpoint
from megarl.config.layout import critic_shape, model_shape
from megarl.config.schema import RunConfig
from megarl.core.device_table import DeviceRow, table_tree
from megarl.core.errors import StorageError
from megarl.metrics.flops import Arithmetic
from megarl.metrics.health.health import Health
from megarl.metrics.throughput import Derivation, Hardware, Workload
from megarl.run.changes import require_same_run
from megarl.run.directory import RunDirectory, claim
from megarl.run.progress import Progress, last_step_of
from megarl.run.recorder import Desk, Recorder
from megarl.run.summary import History, format_summary
from megarl.trackers.ledger import Ledger, read_ledger, rewind
from megarl.trackers.to_stdout import console_for

logger = logging.getLogger(__name__)


def take_up(config: RunConfig, *, fresh: bool) -> RunDirectory | None:
    """Claim the run's directory for going on, or for starting. None: the run is finished, which has been said."""
    directory = claim(config, fresh=fresh)
    try:
        checkpoint = _newest_readable(directory.checkpoints)
        if checkpoint is not None:
            progress = Progress.from_tree(checkpoint.progress)
            changes = require_same_run(config, progress)
            if progress.step >= last_step_of(config):
                sys.stdout.write(_finished(config, progress, directory) + "\n")
                directory.release()
                return None
            if changes:
                sys.stdout.write(f"Changed since step {progress.step}: {'; '.join(changes)}\n")
                sys.stdout.flush()
        directory.begin(config)
    except BaseException:
        directory.release()
        raise
    return directory


def require_none_damaged(directory: Path) -> None:
    """Nothing to resume from must mean that nothing was saved, or a long run would start over without a word."""
    damaged = sorted(path.name for path in (directory / "checkpoints").glob("step_*.bad*"))
    if damaged:
        raise StorageError(
            "MRL-7301",
            f"every checkpoint of {directory} is damaged ({', '.join(damaged)}): there is nothing to go on from.\n"
            "Put a good copy of one into checkpoints/, or start over with --fresh.",
        )


def open_record(
    config: RunConfig, directory: Path, checkpoint: Checkpoint | None, devices: Sequence[DeviceRow]
) -> tuple[Recorder, History]:
    """The driver's recorder. The ledger keeps the steps that the checkpoint holds: later ones will be made again."""
    path = directory / "metrics.jsonl"
    (directory / "devices.json").write_text(json.dumps(table_tree(devices), indent=1), encoding="utf-8")
    records = rewind(path, checkpoint.step if checkpoint is not None else -1)
    if checkpoint is not None:
        num_bytes = path.stat().st_size if path.is_file() else 0
        if num_bytes != Progress.from_tree(checkpoint.progress).ledger_bytes:
            logger.warning(
                "metrics.jsonl was changed since step %d: its lines of the steps before may be wrong or missing.",
                checkpoint.step,
            )
    history = History(records, config.warmup.num_steps if config.warmup else 0)
    run_id = (directory / "run_id").read_text(encoding="ascii")
    meta = {"num_devices": len(devices), "view": config.metrics.view}
    desk = Desk(
        console_for(config),
        Ledger(path, run_id, meta),
        history,
        _derivation(config, devices),
        Health(
            config.alerts,
            allocator_figures=any(row.name != "cpu" for row in devices),
            max_staleness=config.rollout.max_staleness if config.rollout else 0,
            is_sparse=model_shape(config).experts is not None,
        ),
        splits_phases=config.metrics.phase_time == "full",
    )
    recorder = Recorder(desk)
    recorder.resume(records)
    return recorder, history


def _derivation(config: RunConfig, devices: Sequence[DeviceRow]) -> Derivation:
    peaks = [row.peak_tflops for row in devices if row.peak_tflops is not None]
    hardware = Hardware(len(devices), 1e12 * sum(peaks) if len(peaks) == len(devices) else None)
    actor = Arithmetic.of(model_shape(config))
    critic = Arithmetic.of(critic_shape(config)) if config.uses_critic else None
    return Derivation(hardware, Workload(actor, critic))


def _newest_readable(directory: Path) -> Checkpoint | None:
    """The newest checkpoint with a whole manifest. The ranks will verify the rest of it, and fall back if they must."""
    for step in reversed(steps_present(directory)):
        try:
            return open_checkpoint(directory, step)
        except StorageError:
            continue
    return None


def _finished(config: RunConfig, progress: Progress, directory: RunDirectory) -> str:
    warmup_steps = config.warmup.num_steps if config.warmup else 0
    records = read_ledger(directory.ledger) if directory.ledger.is_file() else []
    summary = format_summary(History(records, warmup_steps), directory.path, warmup_steps)
    return (
        f"Run {config.run.name!r} is finished: all {progress.step} steps are done, nothing was started.\n"
        f"For more, raise run.num_steps; to start over, add --fresh.\n{summary}"
    )
