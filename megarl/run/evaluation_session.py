"""`megarl eval` on one rank: open inputs, build what evaluates, evaluate, write the results."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.checkpoint.commit import made_with
from megarl.config.schema import RunConfig
from megarl.core import whereabouts
from megarl.core.errors import StorageError
from megarl.core.sample import Prompt, Sample
from megarl.core.world import World
from megarl.metrics.meter import Meter
from megarl.metrics.reduce import reduce_to_driver
from megarl.rollout.answering import OnSample, take_no_notice
from megarl.run.build import Builder
from megarl.run.candidate import Candidate
from megarl.run.evaluate import EvalSet
from megarl.run.evaluation_plan import moved_to
from megarl.run.evaluation_table import evaluation_table
from megarl.run.inputs import open_inputs
from megarl.run.progress import config_digest
from megarl.run.recorder import Recorder
from megarl.trackers.json_numbers import number_for_json

_SECONDS_BETWEEN_LINES = 5.0


def run_evaluation(config: RunConfig, candidate: Candidate, world: World, directory: Path, out: Path | None) -> None:
    """Evaluate every set once; the driver shows a table and writes a JSON file. Collective.

    ``directory`` is the evaluation's own: engines keep their logs in it.
    """
    started = time.time()
    moved = moved_to(config, directory)
    inputs = open_inputs(moved, with_prompts=world.is_driver, with_training=False)
    source, step = candidate.weights(moved, world)
    if world.is_driver:
        _say(f"Evaluating {_name(candidate, config, step)} on {_sizes(config)}")
        inputs.start_scorers()  # they warm up while the model is built
    evaluation = Builder(moved, inputs, world, Recorder(None)).build_evaluation(source)
    meter = Meter()
    whereabouts.begin_step(step or 0)  # everything is built: from here on, who stands still is missed
    try:
        evaluator = evaluation.evaluator
        for kind in ("eval", "bench"):
            sets = [replace(one, kind="bench") for one in evaluator.sets if one.kind == kind]
            evaluator.evaluate(sets, step or 0, meter, _progress(sets) if world.is_driver else take_no_notice)
    finally:
        evaluation.close()
        inputs.close()
    metrics = reduce_to_driver(meter, world)
    if metrics is None:
        return
    found = {name: value for name, value in metrics.items() if name.startswith("bench/")}
    counts = {one.name: (len(one.prompts), one.num_samples) for one in evaluation.evaluator.sets}
    _say(evaluation_table(found, counts))
    tree = {
        "model": _name(candidate, config, None),
        "step": step,
        "config": config.run.name,
        "config_digest": config_digest(config.model_dump(mode="json")),
        "made_with": made_with(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "seconds": round(time.time() - started, 3),
        "sets": {
            name: {"num_prompts": counts[name][0], **own.model_dump(mode="json")} for _, name, own in config.eval_sets
        },
        "metrics": {name: number_for_json(value) for name, value in found.items()},
    }
    path = out if out is not None else directory / "result.json"
    write_whole(path, tree)
    _say(f"Written to {path}")


def write_whole(path: Path, tree: Mapping[str, Any]) -> None:
    """The file appears whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(tree, file, indent=2, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        raise StorageError("MRL-7002", f"{path} cannot be written: {error.strerror}.") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _progress(sets: Sequence[EvalSet]) -> OnSample:
    """Tells how many samples are drawn, every few seconds. They may be finished by any thread."""
    total = sum(len(one.prompts) * one.num_samples for one in sets)
    started = told = time.monotonic()
    done = 0

    def on_sample(prompt: Prompt, sample: Sample) -> None:  # noqa: ARG001
        nonlocal done, told
        done += 1
        now = time.monotonic()
        if now - told > _SECONDS_BETWEEN_LINES or (done == total and told > started):
            told = now
            _say(f"  {done:,} of {total:,} samples, {now - started:,.0f} s")

    return on_sample


def _name(candidate: Candidate, config: RunConfig, step: int | None) -> str:
    if candidate.path is not None:
        return f"{candidate.path}" + ("" if step is None else f", step {step},")
    return config.model.path or "random weights"


def _sizes(config: RunConfig) -> str:
    return ", ".join(f"{name} (at most {own.max_prompts} x {own.num_samples})" for _, name, own in config.eval_sets)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
