"""Rollouts on disk, one group per line of JSON: for replay, for parity tests, and for people to read.

Reading gives back exactly what was written. JSON numbers are doubles, which hold every float32 log-prob and every
float64 reward without rounding. Non-finite numbers have no place in JSON and are refused.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import DataError, MissingInputError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Group, Prompt, Sample, Turn, VersionSpan

# One sample's numbers per token that are not the rollout's: what the trainer said and made of it.
TokenNotes = Mapping[str, list[float]]
NOTES = ("old_logprobs", "token_advantages")


@dataclass(slots=True)
class RecordedStep:
    """The groups of one step, and the complete passes over the prompts when they were drawn."""

    epoch: int = 0
    groups: list[Group] = field(default_factory=list)


def write_groups(
    path: Path,
    step: int,
    groups: Sequence[Group],
    notes: Sequence[Sequence[TokenNotes]] | None = None,
    epoch: int = 0,
) -> None:
    """Append the groups of one step. When a step was written again (after a resume), reading finds the later one.

    ``notes[group][sample]`` are written beside the sample for people; reading leaves them out.
    """
    lines = []
    # every line says how many there are, so that a file that lost its end is not taken for a smaller step
    head = {"step": step, "num_groups": len(groups), "epoch": epoch}
    for position, group in enumerate(groups):
        record = {**head, "group": position, **_group_to_record(group)}
        if notes is not None:
            for sample, own in zip(record["samples"], notes[position], strict=True):
                sample.update(own)
        try:
            lines.append(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
        except (ValueError, TypeError) as error:
            raise DataError(
                "MRL-2301",
                f"{path}: the group of prompt {excerpt(group.prompt.id)} at step {step} cannot be recorded ({error}).",
            ) from error
    if not groups:  # so that a step of which filters left nothing is not taken for a file that lost its lines
        lines.append(json.dumps(head, separators=(",", ":")) + "\n")
    with path.open("a", encoding="ascii") as file:
        file.writelines(lines)


def read_groups(path: Path) -> dict[int, list[Group]]:
    """The recorded groups by step, in the order in which they were written."""
    return {step: recorded.groups for step, recorded in read_steps(path).items()}


def read_steps(path: Path) -> dict[int, RecordedStep]:
    """Everything recorded, by step, in the order in which steps were written first.

    Recordings of earlier versions of megarl lack some of it; what they lack is what a `Sample` has by default.
    """
    if not path.is_file():
        raise MissingInputError("MRL-4103", f"{path}: there is no such recording.")
    steps: dict[int, RecordedStep] = {}
    num_groups: dict[int, int] = {}
    # What was written is plain ASCII; a damaged byte must become a bad line, not an error without a line number.
    with path.open(encoding="ascii", errors="backslashreplace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                if record.get("num_groups") == 0:
                    steps[int(record["step"])] = RecordedStep(int(record["epoch"]))
                    num_groups[int(record["step"])] = 0
                    continue
                step, position, group = int(record["step"]), int(record["group"]), _group_from_record(record)
                epoch, num_expected = int(record.get("epoch", 0)), int(record.get("num_groups", 0))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                raise DataError(
                    "MRL-2302",
                    f"{path}:{number} is not a recorded group ({type(error).__name__}: {excerpt(str(error))}): "
                    f"{excerpt(line)}.",
                ) from error
            if position == 0:
                steps[step] = RecordedStep(epoch)
            if step not in steps or position != len(steps[step].groups):
                raise DataError("MRL-2302", f"{path}:{number} step {step}: group {position} follows a missing group.")
            steps[step].groups.append(group)
            num_groups[step] = num_expected
    for step, recorded in steps.items():
        if len(recorded.groups) < num_groups[step]:
            what = f"step {step} has {len(recorded.groups)} of {num_groups[step]} groups"
            raise DataError("MRL-2302", f"{path}:{number} is the last line, but {what}: the rest is lost.")
    return steps


def _group_to_record(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    return {
        "prompt": {
            "id": prompt.id,
            "text": prompt.text,
            "token_ids": prompt.token_ids.tolist(),
            "answer": prompt.answer,
            "demonstration": prompt.demonstration,
            "task": prompt.task,
            "metadata": dict(prompt.metadata),
            "messages": [dict(message) for message in prompt.messages],
        },
        "samples": [_sample_to_record(sample) for sample in group.samples],
    }


def _sample_to_record(sample: Sample) -> dict[str, Any]:
    return {
        "response": sample.response,
        "turns": [list(turn) for turn in sample.turns],
        "outcome": sample.outcome,
        "failure": sample.failure,
        "reward": sample.reward,
        "scores": sample.scores,
        "shaped_reward": sample.shaped_reward,
        "weight": sample.weight,
        "advantage": sample.advantage,
        "finish": sample.finish,
        "version": sample.version,
        "spans": [list(span) for span in sample.spans],
        "engine": sample.engine,
        "seed": sample.seed,
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "rollout_logprobs": sample.rollout_logprobs.tolist(),
        "routed_experts": _experts_to_record(sample.routed_experts),
    }


def _experts_to_record(experts: NDArray[np.int32] | None) -> dict[str, Any] | None:
    """Many small numbers: little-endian int32 in base64, which is a third of their decimal digits."""
    if experts is None:
        return None
    return {"shape": list(experts.shape), "int32": base64.b64encode(experts.astype("<i4").tobytes()).decode("ascii")}


def _experts_from_record(record: dict[str, Any] | None) -> NDArray[np.int32] | None:
    if record is None:
        return None
    numbers = np.frombuffer(base64.b64decode(record["int32"], validate=True), dtype="<i4")
    return numbers.astype(np.int32).reshape(record["shape"])


def _group_from_record(record: dict[str, Any]) -> Group:
    prompt = record["prompt"]
    read = {
        "token_ids": np.array(prompt["token_ids"], dtype=np.int64),
        "messages": tuple(prompt.get("messages", ())),
    }
    return Group(
        Prompt(**{**prompt, **read}),
        [_sample_from_record(sample) for sample in record["samples"]],
    )


def _sample_from_record(record: dict[str, Any]) -> Sample:
    read = {
        "token_ids": np.array(record["token_ids"], dtype=np.int64),
        "loss_mask": np.array(record["loss_mask"], dtype=np.int8),
        "rollout_logprobs": np.array(record["rollout_logprobs"], dtype=np.float32),
        "turns": tuple(Turn(*turn) for turn in record.get("turns", ())),
        "spans": tuple(VersionSpan(*span) for span in record.get("spans", ())),
        "routed_experts": _experts_from_record(record.get("routed_experts")),
    }
    own = {name: value for name, value in record.items() if name not in NOTES}
    return Sample(**{**own, **read})
