"""Prompts by name: a JSONL or Parquet file, or a task that is built in. The one door to all prompt data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megarl.core.errors import ConfigError, DataError, MissingInputError
from megarl.core.sample import Prompt
from megarl.data.carry import CARRY
from megarl.data.encoder import PromptEncoder
from megarl.data.generated import HeldOutProblems, TrainingProblems
from megarl.data.jsonl_prompts import JsonlPrompts
from megarl.data.parquet_prompts import MAGIC, ParquetPrompts
from megarl.data.rejected import BadRowPolicy
from megarl.data.rows import PromptField, PromptKeys, RowRules
from megarl.data.sort_digits import SORT

__all__ = ["BUILTINS", "BadRowPolicy", "PromptField", "PromptKeys", "PromptSource", "open_prompts"]

_GZIP = b"\x1f\x8b"


class PromptSource(Protocol):
    """A finite list of prompts that never changes; ``source[i]`` gives the same prompt each time."""

    @property
    def num_skipped_rows(self) -> int:
        """Bad rows that the user allowed to be skipped."""

    @property
    def skip_report(self) -> str:
        """What was left out and why, to be shown once; empty if nothing."""

    @property
    def content_hash(self) -> str | None:
        """SHA-256 of the file; None for tasks that are built in."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


BUILTINS: dict[str, Callable[[PromptEncoder], PromptSource]] = {
    "builtin:carry": lambda encoder: TrainingProblems(CARRY, encoder),
    "builtin:carry_held_out": lambda encoder: HeldOutProblems(CARRY, encoder),
    "builtin:sort": lambda encoder: TrainingProblems(SORT, encoder),
    "builtin:sort_held_out": lambda encoder: HeldOutProblems(SORT, encoder),
}


def open_prompts(
    spec: str,
    encoder: PromptEncoder,
    keys: PromptKeys | None = None,
    *,
    policy: BadRowPolicy | None = None,
    required: frozenset[PromptField] = frozenset(),
    where: str = "data.train",
) -> PromptSource:
    """Open ``spec`` and check all of it.

    ``required`` fields must be present in every prompt; ``where`` is the config key to blame.
    """
    if not spec.startswith("builtin:"):
        rules = RowRules(keys or PromptKeys(), encoder, required)
        return _open_file(Path(spec), rules, policy or BadRowPolicy(), where)
    build = BUILTINS.get(spec)
    if build is None:
        raise ConfigError("MRL-1405", f"{where}={spec!r} is not known. Built in: {', '.join(BUILTINS)}.")
    source = build(encoder)
    missing = sorted(field for field in required if getattr(source[0], field) is None)
    if missing:
        raise ConfigError("MRL-1406", f"{where}={spec!r} has no {' and no '.join(missing)}, which this run needs.")
    return source


def _open_file(path: Path, rules: RowRules, policy: BadRowPolicy, where: str) -> PromptSource:
    """The file's first bytes tell its format, whatever it is called."""
    if not path.is_file():
        problem = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise MissingInputError(
            "MRL-4102", f"{where}={str(path)!r} {problem}. Give a JSONL or Parquet file, or a builtin: name."
        )
    try:
        with path.open("rb") as file:
            start = file.read(len(MAGIC))
        if start.startswith(_GZIP) or path.suffix == ".gz":
            raise DataError("MRL-2006", f"{where}={str(path)!r} is compressed. Unpack it first: gunzip --keep {path}")
        if start == MAGIC:
            return ParquetPrompts(path, rules, policy)
        if path.suffix == ".parquet":
            raise DataError("MRL-2010", f"{where}={str(path)!r} does not begin like a Parquet file: it is damaged.")
        return JsonlPrompts(path, rules, policy)
    except OSError as error:
        raise MissingInputError("MRL-4102", f"{where}={str(path)!r} cannot be read ({error.strerror}).") from error
