"""Prompts by name: a JSONL file, or a task that is built in. The one door to all prompt data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megarl.core.errors import ConfigError
from megarl.core.sample import Prompt
from megarl.data.carry import CARRY
from megarl.data.cursor import Cursor
from megarl.data.generated import HeldOutProblems, TrainingProblems
from megarl.data.jsonl_prompts import BadRows, PromptField, PromptKeys, RowRules, open_jsonl
from megarl.data.sort_digits import SORT
from megarl.data.tokenizer import Tokenizer

__all__ = ["BUILTINS", "Cursor", "PromptField", "PromptKeys", "PromptSource", "open_prompts"]


class PromptSource(Protocol):
    """A finite list of prompts that never changes; ``source[i]`` gives the same prompt each time."""

    @property
    def num_skipped_rows(self) -> int:
        """Bad rows that the user allowed to be skipped."""

    @property
    def skip_report(self) -> str:
        """Which rows were skipped and why, to be shown once; empty if none."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


BUILTINS: dict[str, Callable[[Tokenizer], PromptSource]] = {
    "builtin:carry": lambda tokenizer: TrainingProblems(CARRY, tokenizer),
    "builtin:carry_held_out": lambda tokenizer: HeldOutProblems(CARRY, tokenizer),
    "builtin:sort": lambda tokenizer: TrainingProblems(SORT, tokenizer),
    "builtin:sort_held_out": lambda tokenizer: HeldOutProblems(SORT, tokenizer),
}


def open_prompts(
    spec: str,
    tokenizer: Tokenizer,
    keys: PromptKeys | None = None,
    *,
    bad_rows: BadRows = "error",
    max_bad_rows: int = 100,
    required: frozenset[PromptField] = frozenset(),
    where: str = "data.train",
) -> PromptSource:
    """Open ``spec`` and check all of it.

    ``required`` fields must be present in every prompt; ``where`` is the config key to blame.
    """
    if not spec.startswith("builtin:"):
        rules = RowRules(keys or PromptKeys(), tokenizer, required)
        return open_jsonl(Path(spec), rules, bad_rows, max_bad_rows, where)
    build = BUILTINS.get(spec)
    if build is None:
        raise ConfigError("MRL-1405", f"{where}={spec!r} is not known. Built in: {', '.join(BUILTINS)}.")
    source = build(tokenizer)
    missing = sorted(field for field in required if getattr(source[0], field) is None)
    if missing:
        raise ConfigError("MRL-1406", f"{where}={spec!r} has no {' and no '.join(missing)}, which this run needs.")
    return source
