"""The samples that a run wrote down, one by one, and the choice of those that are worth a look."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.core.errors import MissingInputError
from megarl.core.excerpt import excerpt
from megarl.core.step_ranges import step_ranges

_FILE = re.compile(r"step_([0-9]{1,15})\.jsonl")
# `rollout.kept_groups` writes some groups of some steps, with advantages; `rollout.record` all, as they were scored
_KEPT, _RECORDED = "samples", "rollouts"

Show = Literal["worst", "best", "random"]
SHOWS: tuple[Show, ...] = ("worst", "best", "random")


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One sample as it was written, with its prompt. ``why`` says what it was chosen for."""

    step: int
    group: int
    position: int
    prompt: dict[str, Any]
    sample: dict[str, Any]
    why: str = ""

    @property
    def reward(self) -> float | None:
        """None if it failed, or was never scored."""
        value = self.sample.get("reward")
        return float(value) if isinstance(value, (int, float)) else None

    def contains(self, text: str) -> bool:
        """Whether the prompt or the response has the text, in capital or small letters."""
        spoken = (str(self.prompt.get("text", "")), str(self.sample.get("response", "")))
        return any(text.casefold() in one.casefold() for one in spoken)

    def to_json(self) -> str:
        """Everything that was written about the sample, on one line of plain ASCII."""
        head = {"step": self.step, "group": self.group, "sample": self.position, "prompt": self.prompt}
        return json.dumps(head | self.sample, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What is there of one step."""

    step: int
    rows: list[SampleRow]
    sources: list[Path]
    # lines that are no group: of a file that is being written, or was damaged
    num_bad_lines: int


def read_step(run: Path, step: int | None) -> SampledStep:
    """The samples of ``step``, or of the newest step that has any."""
    if not run.is_dir():
        raise MissingInputError(
            "MRL-4210", f"{excerpt(str(run))} is no directory. Give a run directory, for example runs/quickstart."
        )
    files = {kind: _files(run / kind) for kind in (_KEPT, _RECORDED)}
    steps = sorted({number for own in files.values() for number in own})
    if not steps:
        raise MissingInputError(
            "MRL-4211",
            f"{excerpt(str(run))} holds no samples.\n"
            "Set rollout.kept_groups: 4 to keep some of every tenth step, or rollout.record: true to keep all.",
        )
    chosen = steps[-1] if step is None else step
    if chosen not in steps:
        raise MissingInputError(
            "MRL-4212", f"{excerpt(str(run))} holds no samples of step {chosen}; it has steps {step_ranges(steps)}."
        )
    sources = [own[chosen] for own in files.values() if chosen in own]
    groups: dict[int, dict[str, Any]] = {}
    num_bad = 0
    for path in reversed(sources):  # what was kept knows more about a sample than what was recorded
        own, num_bad_here = _read_groups(path)
        groups |= own
        num_bad += num_bad_here
    rows = [
        SampleRow(chosen, number, position, group["prompt"], sample)
        for number, group in sorted(groups.items())
        for position, sample in enumerate(group["samples"])
    ]
    return SampledStep(chosen, rows, sources, num_bad)


def choose(rows: Sequence[SampleRow], shows: Sequence[Show], num_each: int) -> list[SampleRow]:
    """``num_each`` for each of ``shows``, none twice. A failed sample is worse than any; chance depends on the step
    alone.
    """
    ascending = sorted(rows, key=lambda row: (row.reward is not None, row.reward or 0.0))
    shuffled = list(rows)
    random.Random(rows[0].step if rows else 0).shuffle(shuffled)
    orders = {"worst": ascending, "best": ascending[::-1], "random": shuffled}
    chosen: dict[tuple[int, int], SampleRow] = {}
    for show in shows:
        fresh = [row for row in orders[show] if (row.group, row.position) not in chosen]
        for row in fresh[:num_each]:
            chosen[row.group, row.position] = SampleRow(
                row.step, row.group, row.position, row.prompt, row.sample, why=show
            )
    return list(chosen.values())


def _files(directory: Path) -> dict[int, Path]:
    return {int(found[1]): path for path in directory.glob("*") if (found := _FILE.fullmatch(path.name))}


def _read_groups(path: Path) -> tuple[dict[int, dict[str, Any]], int]:
    """The groups of a file by their number, and the number of lines that are none."""
    groups: dict[int, dict[str, Any]] = {}
    num_bad = 0
    for record in _records(path):
        if record is None:
            num_bad += 1
        elif "group" in record:
            if record["group"] == 0:  # the step was written again, after a resume
                groups = {}
            groups[record["group"]] = record
    return groups, num_bad


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """What each line holds; None for a line that is no group, nor says that there is none."""
    try:
        with path.open("rb") as file:
            for line in file:
                try:
                    record = json.loads(line)
                    yield record if _is_group(record) or record.get("num_groups") == 0 else None
                except (ValueError, AttributeError):
                    yield None
    except OSError as error:
        raise MissingInputError("MRL-4213", f"{excerpt(str(path))} cannot be read ({error.strerror}).") from error


def _is_group(record: Any) -> bool:
    return (
        isinstance(record.get("group"), int)
        and isinstance(record.get("prompt"), dict)
        and isinstance(record.get("samples"), list)
        and all(isinstance(sample, dict) for sample in record["samples"])
    )
