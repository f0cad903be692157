"""Rollouts for people to read: the text of every token, its log-prob and its advantage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.core.errors import MegarlError
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.report.series import evenly, is_number, number
from megarl.report.settings import Settings

MAX_STEPS = 20
# As many as a browser shows without delay; twenty steps of them are about 5 MB. A step shows at least one group.
_MAX_TOKENS_OF_STEP = 10_000
_MAX_TOKENS_OF_SAMPLE = 4_000
_MAX_TEXT = 20_000
_FILE = re.compile(r"step_([0-9]{1,15})\.jsonl")
# A character has at most four bytes and so at most four tokens; more that make no text are no text.
_MAX_TOKENS_OF_CHARACTER = 4

Decode = Callable[[list[int]], list[str]]


def read_samples(directory: Path, settings: Settings) -> list[dict[str, Any]]:
    """At most twenty steps of ``samples/``, evenly chosen; none if there is no such directory."""
    files = {int(found[1]): path for path in directory.glob("samples/*") if (found := _FILE.fullmatch(path.name))}
    chosen = evenly(sorted(files), MAX_STEPS)
    if not chosen:
        return []
    decode = _decoder(settings)
    steps = [{"step": step, **_read_step(files[step], decode)} for step in chosen]
    return [step for step in steps if step["groups"]]


def _read_step(path: Path, decode: Decode) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    num_groups = num_tokens = 0
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                if record.get("group") == 0:  # the step was recorded again, after a resume
                    groups, num_groups, num_tokens = [], 0, 0
                num_groups += 1
                if num_tokens < _MAX_TOKENS_OF_STEP:
                    groups.append(_group(record, decode))
                    num_tokens += sum(len(sample["tokens"]) for sample in groups[-1]["samples"])
            except (ValueError, KeyError, TypeError, AttributeError, IndexError):
                continue  # not a group; a report shows what can be shown
    return {"num_groups": num_groups, "groups": groups}


def _group(record: dict[str, Any], decode: Decode) -> dict[str, Any]:
    prompt = record["prompt"]
    answer = prompt.get("answer")
    return {
        "prompt": str(prompt["text"])[:_MAX_TEXT],
        "answer": None if answer is None else str(answer)[:_MAX_TEXT],
        "task": str(prompt.get("task", "")),
        "samples": [_sample(sample, decode) for sample in record["samples"]],
    }


def _sample(record: dict[str, Any], decode: Decode) -> dict[str, Any]:
    """From the first token that the policy wrote. Tokens it did not write (tool output) have no numbers."""
    mask = [bool(bit) for bit in record["loss_mask"]]
    start = mask.index(True) if True in mask else len(mask)
    window = slice(start, start + _MAX_TOKENS_OF_SAMPLE)
    sample = {
        "reward": _number_or_none(record.get("reward")),
        "advantage": _number_or_none(record.get("advantage")),
        "finish": str(record.get("finish", "")),
        "num_tokens": len(mask) - start,
        "tokens": decode([int(token) for token in record["token_ids"]][window]),
        "logprobs": _of_tokens(record["rollout_logprobs"], mask, window),
    }
    for name, key in (("old_logprobs", "old_logprobs"), ("advantages", "token_advantages")):
        if len(record.get(key) or ()) == len(mask):
            sample[name] = _of_tokens(record[key], mask, window)
    return sample


def _of_tokens(values: list[float], mask: list[bool], window: slice) -> list[float | str | None]:
    pairs = zip(values[window], mask[window], strict=True)
    return [number(float(f"{value:.3g}")) if is_ours else None for value, is_ours in pairs]


def _number_or_none(value: object) -> float | str | None:
    return number(float(value)) if is_number(value) else None


def _decoder(settings: Settings) -> Decode:
    """Texts of tokens by the run's tokenizer; their numbers if it is not at hand any more."""
    try:
        tokenizer = load_tokenizer(str(settings.get("model.tokenizer") or settings.get("model.path")))
    except (MegarlError, OSError):
        return lambda ids: [f"⟨{token}⟩" for token in ids]
    return lambda ids: token_texts(tokenizer, ids)


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """One piece of text per token; together they are the decoded text.

    A character of several tokens belongs to the last of them, the others are empty.
    """
    texts: list[str] = []
    context = start = 0  # tokens before `start` have their text; those from `context` on are decoded once more with it
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[context:start], skip_special=False)
        text = tokenizer.decode(ids[context:end], skip_special=False)
        is_whole = not text.endswith("\ufffd") or end == len(ids) or end - start >= _MAX_TOKENS_OF_CHARACTER
        texts.append(text[len(before) :] if is_whole else "")
        if is_whole:
            context, start = start, end
    return texts
