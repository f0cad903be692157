"""A whole training session on one rank: find the checkpoint, open inputs, build, restore, loop, summary."""

from __future__ import annotations

from pathlib import Path

from megarl import __version__
from megarl.checkpoint.commit import made_with
from megarl.checkpoint.store import Checkpoint, CheckpointStore
from megarl.config.schema import RunConfig
from megarl.config.tracking import services_of
from megarl.core.device_table import meet_devices
from megarl.core.errors import MegarlError
from megarl.core.world import World
from megarl.report.write import write_report
from megarl.run.build import Builder
from megarl.run.directory import num_restarts
from megarl.run.inputs import open_inputs
from megarl.run.loop import train
from megarl.run.progress import last_step_of
from megarl.run.recorder import Recorder
from megarl.run.resume import open_record, require_none_damaged
from megarl.run.state import same_layout
from megarl.run.stop import StopRequest
from megarl.run.summary import History, format_summary
from megarl.trackers.followers import Followers


def run_session(config: RunConfig, world: World, directory: Path, stop: StopRequest, *, inputs_checked: bool) -> None:
    """Train to the end, from the newest good checkpoint if there is one. The driver records and speaks. Collective."""
    inputs = open_inputs(config, with_prompts=world.is_driver, speak=not inputs_checked, describe_in=directory)
    store = CheckpointStore(directory / "checkpoints", world, config.checkpoint.keep)
    checkpoint = store.open_newest()
    if checkpoint is None:
        require_none_damaged(directory)
    world, devices = meet_devices(world, config.hardware.peak_tflops)
    recorder, history, followers = Recorder(None), History(), None
    if world.is_driver:
        recorder, history = open_record(config, directory, checkpoint, devices)
        followers = Followers(directory, services_of(config.track_with))
        recorder.attach(followers)
    recorder.announce(
        f"megarl {__version__}: {config.run.name} on {world.size} ranks (tp {world.tp.size}, pp {world.pp.size}, "
        f"dp {world.dp.size}), {world.device.type}, run directory {directory}"
    )
    if inputs.encoder.template is not None:
        recorder.announce(f"Chat template: {inputs.encoder.template.source}")
    if world.is_driver and config.generates:
        inputs.start_scorers()  # they warm up while the models are built
    run = Builder(config, inputs, world, recorder).build(store, stop)
    if checkpoint is not None:
        recorder.announce(_where_it_resumes(config, checkpoint, directory))
        run.checkpoints.restore(checkpoint)
    num_done = checkpoint.step if checkpoint is not None else 0
    if followers is not None:  # they started while the models were being built
        followers.await_ready()
    recorder.start(last_step_of(config), num_done)
    try:
        train(run, num_done)
    except MegarlError:  # stopped, or stopped by itself: there is something to look at
        if world.is_driver:
            _report(directory)
        raise
    finally:
        run.close()
        recorder.finish()
        inputs.close()
    recorder.announce(format_summary(history, directory, config.warmup.num_steps if config.warmup else 0))
    if world.is_driver:
        recorder.announce(_report(directory))


def _report(directory: Path) -> str:
    """Write the report and say where it is. The run has succeeded whatever becomes of its picture."""
    try:
        return f"  Report: {write_report(directory)}"
    except Exception as error:
        return f"  No report could be written ({type(error).__name__}: {error}). Try: megarl report {directory}"


def _where_it_resumes(config: RunConfig, checkpoint: Checkpoint, directory: Path) -> str:
    step, last_step = checkpoint.step, last_step_of(config)
    text = f"Resuming at step {step + 1} of {last_step} from checkpoints/step_{step:06d}"
    text += f" (restart {num_restarts(directory)})"
    if not same_layout(checkpoint.progress["config"], config.model_dump(mode="json")):
        sizes = ", ".join(f"{name} {size}" for name, size in checkpoint.layout.items())
        text += f"; it was saved in another layout ({sizes}) and is being cut anew"
    now = made_with()
    others = [
        f"{name} {was}, now {now.get(name)}" for name, was in checkpoint.made_with.items() if was != now.get(name)
    ]
    if others:
        text += f"; it was made with {', '.join(others)}: the last bits of numbers may differ"
    return text
