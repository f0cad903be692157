"""A whole training session on one rank: inputs, build, loop, summary."""

from __future__ import annotations

from pathlib import Path

from megarl import __version__
from megarl.config.schema import RunConfig
from megarl.core.world import World
from megarl.run.build import Builder
from megarl.run.inputs import open_inputs
from megarl.run.loop import train
from megarl.run.recorder import Recorder
from megarl.run.summary import History, format_summary
from megarl.trackers.ledger import Ledger
from megarl.trackers.to_stdout import ToStdout


def run_session(config: RunConfig, world: World, directory: Path, *, inputs_checked: bool) -> None:
    """Train to the end. The driver records and speaks. Collective."""
    inputs = open_inputs(config, with_prompts=world.is_driver, measure=not inputs_checked)
    console = ToStdout() if world.is_driver else None
    ledger = Ledger(directory / "metrics.jsonl") if world.is_driver else None
    history = History()
    recorder = Recorder(console, ledger, history)
    recorder.announce(
        f"megarl {__version__}: {config.run.name} on {world.size} ranks (tp {world.tp.size}, pp {world.pp.size}, "
        f"dp {world.dp.size}), {world.device.type}, run directory {directory}"
    )
    run = Builder(config, inputs, world, recorder).build()
    warmup_steps = config.warmup.num_steps if config.warmup else 0
    recorder.start(warmup_steps + config.run.num_steps)
    try:
        train(run)
    finally:
        recorder.finish()
        inputs.close()
    recorder.announce(format_summary(history, directory, warmup_steps))
