"""A whole training session on one rank: inputs, build, loop, summary."""

from __future__ import annotations

from pathlib import Path

from megarl.config.schema import RunConfig
from megarl.core.world import World
from megarl.run.build import Builder
from megarl.run.inputs import open_inputs
from megarl.run.loop import train
from megarl.run.recorder import Recorder, Tracker
from megarl.run.summary import History, format_summary
from megarl.trackers.ledger import Ledger
from megarl.trackers.progress_bar import ProgressBar
from megarl.trackers.to_stdout import ToStdout


def run_session(config: RunConfig, world: World, directory: Path) -> None:
    """Train to the end. The driver records and speaks. Collective."""
    inputs = open_inputs(config, with_prompts=world.is_driver)
    console = ToStdout()
    trackers: list[Tracker] = [console, Ledger(directory / "metrics.jsonl")] if world.is_driver else []
    history, progress = History(), ProgressBar()
    warmup_steps = config.warmup.num_steps if config.warmup else 0
    recorder = Recorder(trackers, progress, history)
    run = Builder(config, inputs, world, recorder).build()
    if world.is_driver:
        progress.start(warmup_steps + config.run.num_steps, 0)
    try:
        train(run)
    finally:
        recorder.finish()
        inputs.close()
    if world.is_driver:
        console.write(format_summary(history, directory, warmup_steps))
