"""``megarl samples``: what the policy was asked and said, and what that earned, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.report.sample_files import SampledStep, SampleRow
from megarl.report.terminal_text import num_cells, visible, wrap

_MIN_WIDTH, _MAX_WIDTH = 50, 160
_LABEL = 11
# of a text that is too long: so many lines of its beginning and of its end
_HEAD, _TAIL = 12, 5


def render(sampled: SampledStep, rows: Sequence[SampleRow], width: int, *, full: bool) -> Iterator[str]:
    """The lines of the table: a head about the whole step, then one block for each of ``rows``."""
    width = max(_MIN_WIDTH, min(width, _MAX_WIDTH))
    for line in _head(sampled):
        yield from wrap(line, width)
    for row in rows:
        yield ""
        title = f"── {row.why + ' · ' if row.why else ''}group {row.group} · sample {row.position} "
        yield title + "─" * max(0, width - num_cells(title))
        room = width - _LABEL - 3
        for label, text in _fields(row, room):
            yield from _field(label, text, room, full=full)


def _head(sampled: SampledStep) -> Iterator[str]:
    rows = sampled.rows
    num_prompts = len({row.group for row in rows})
    where = " and ".join(str(Path(*path.parts[-2:])) for path in sampled.sources)
    yield f"step {sampled.step}: {_count(num_prompts, 'prompt')}, {_count(len(rows), 'sample')} in {where}"
    if not rows:
        yield "Filters and failed rewards left nothing of this step."
    rewards = [row.reward for row in rows if row.reward is not None]
    if rewards:
        mean = sum(rewards) / len(rewards)
        yield f"reward: mean {mean:.4g}, lowest {min(rewards):.4g}, highest {max(rewards):.4g}"
    num_failed = sum(bool(row.sample.get("failure")) for row in rows)
    if num_failed:
        yield f"{_count(num_failed, 'sample')} failed to be scored"


def _fields(row: SampleRow, room: int) -> Iterator[tuple[str, str]]:
    prompt, sample = row.prompt, row.sample
    yield "", _in_lines(_numbers(sample), room)
    if sample.get("failure"):
        yield "failed", str(sample["failure"])
    scores = sample.get("scores")
    if isinstance(scores, dict) and scores:
        yield "scores", _in_lines([f"{name} {_number(value)}" for name, value in scores.items()], room)
    yield "prompt", str(prompt.get("text", ""))
    if prompt.get("answer") is not None:
        yield "answer", str(prompt["answer"])
    turns = list(_turns(sample))
    yield from turns or [("response", str(sample.get("response", "")))]


def _turns(sample: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Who said what, in a conversation of several turns."""
    for turn in sample.get("turns") or ():
        if isinstance(turn, dict):
            yield str(turn.get("speaker", "")), str(turn.get("text", ""))
        elif isinstance(turn, list) and len(turn) >= 2:
            yield str(turn[0]), str(turn[1])


def _numbers(sample: dict[str, Any]) -> list[str]:
    """The sample's numbers. Advantages are known only where the sample was kept after it was credited."""
    credited = sample.get("shaped_reward") is not None
    parts = [f"reward {_number(sample.get('reward'))}"]
    if credited and sample["shaped_reward"] != sample.get("reward"):
        parts.append(f"shaped {_number(sample['shaped_reward'])}")
    parts.append(f"advantage {_number(sample.get('advantage')) if credited else '-'}")
    if sample.get("weight", 1.0) != 1.0:
        parts.append(f"weight {_number(sample['weight'])}")
    mask = sample.get("loss_mask")
    if isinstance(mask, list):
        parts.append(_count(sum(1 for own in mask if own), "token"))
    parts += [f"finish {sample.get('finish', '-')}", f"version {sample.get('version', '-')}"]
    return parts


def _in_lines(parts: Sequence[str], room: int) -> str:
    """As many parts as fit into a line, none of them broken."""
    lines = [parts[0]]
    for part in parts[1:]:
        longer = f"{lines[-1]}  {part}"
        if num_cells(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def _field(label: str, text: str, room: int, *, full: bool) -> Iterator[str]:
    """A label on the left and the text on the right, each of its lines behind a bar of ours."""
    num_lines = _HEAD + _TAIL
    # cut before anything is done with it: it may be a gigabyte. No line has more than four characters for a column.
    beginning = text if full else text[: 4 * room * (num_lines + 1)]
    lines = list(islice(wrap(beginning, room), None if full else num_lines + 1))
    if len(lines) > num_lines and not full:
        end = list(wrap(text[-room * num_lines :], room))[-_TAIL:]
        lines = [*lines[:_HEAD], f"⋮ {len(text):,} characters: see --full", *end]
    label = visible(label).replace("\n", " ")[:_LABEL]
    for number, line in enumerate(lines):
        yield f"{label if number == 0 else '':>{_LABEL}} │ {line}".rstrip()


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
