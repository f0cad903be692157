"""Rollouts on disk, one group per line of JSON: for replay, for parity tests, and for people to read.

Reading gives back exactly what was written. JSON numbers are doubles, which hold every float32 log-prob and every
float64 reward without rounding. Non-finite numbers have no place in JSON and are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megarl.core.errors import DataError, MissingInputError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Group, Prompt, Sample

# One sample's numbers per token that are not the rollout's: what the trainer said and made of it.
TokenNotes = Mapping[str, list[float]]
NOTES = ("old_logprobs", "token_advantages")


def write_groups(
    path: Path, step: int, groups: Sequence[Group], notes: Sequence[Sequence[TokenNotes]] | None = None
) -> None:
    """Append the groups of one step. When a step was written again (after a resume), reading finds the later one.

    ``notes[group][sample]`` are written beside the sample for people; reading leaves them out.
    """
    lines = []
    for position, group in enumerate(groups):
        record = {"step": step, "group": position, **_group_to_record(group)}
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
    with path.open("a", encoding="ascii") as file:
        file.writelines(lines)


def read_groups(path: Path) -> dict[int, list[Group]]:
    """The recorded groups by step, in the order in which they were written."""
    if not path.is_file():
        raise MissingInputError("MRL-4103", f"{path}: there is no such recording.")
    steps: dict[int, list[Group]] = {}
    # What was written is plain ASCII; a damaged byte must become a bad line, not an error without a line number.
    with path.open(encoding="ascii", errors="backslashreplace") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                step, position, group = record["step"], record["group"], _group_from_record(record)
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    "MRL-2302",
                    f"{path}:{number} is not a recorded group ({type(error).__name__}: {excerpt(str(error))}): "
                    f"{excerpt(line)}.",
                ) from error
            if position == 0:
                steps[step] = []
            if position != len(steps.get(step, ())):
                raise DataError("MRL-2302", f"{path}:{number} step {step}: group {position} follows a missing group.")
            steps[step].append(group)
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
        },
        "samples": [_sample_to_record(sample) for sample in group.samples],
    }


def _sample_to_record(sample: Sample) -> dict[str, Any]:
    return {
        "response": sample.response,
        "reward": sample.reward,
        "scores": sample.scores,
        "shaped_reward": sample.shaped_reward,
        "weight": sample.weight,
        "advantage": sample.advantage,
        "finish": sample.finish,
        "version": sample.version,
        "seed": sample.seed,
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.tolist(),
        "rollout_logprobs": sample.rollout_logprobs.tolist(),
    }


def _group_from_record(record: dict[str, Any]) -> Group:
    prompt = record["prompt"]
    return Group(
        Prompt(**{**prompt, "token_ids": np.array(prompt["token_ids"], dtype=np.int64)}),
        [_sample_from_record(sample) for sample in record["samples"]],
    )


def _sample_from_record(record: dict[str, Any]) -> Sample:
    arrays = {
        "token_ids": np.array(record["token_ids"], dtype=np.int64),
        "loss_mask": np.array(record["loss_mask"], dtype=np.int8),
        "rollout_logprobs": np.array(record["rollout_logprobs"], dtype=np.float32),
    }
    own = {name: value for name, value in record.items() if name not in NOTES}
    return Sample(**{**own, **arrays})
