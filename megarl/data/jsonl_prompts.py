"""Prompts from a JSONL file: every row is checked when the file is opened, and read again only when it is wanted.

Only the byte offset and the line number of each good row stay in memory. A row is bad for one of the reasons in
`parse_row`, or because its explicit id was used before; no row is ever dropped without being counted.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from megarl.core.errors import DataError, MissingInputError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt
from megarl.data.tokenizer import Tokenizer

BadRows = Literal["error", "skip"]
PromptField = Literal["answer", "demonstration"]

_ID, _TASK = "id", "task"
_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_MAX_REPORTS = 10


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """Which key of a row holds what. ``id`` and ``task`` are called so; all other keys become the prompt's metadata."""

    prompt: str = "prompt"
    answer: str = "answer"
    demonstration: str = "demonstration"


@dataclass(frozen=True, slots=True)
class RowRules:
    """What makes a row good."""

    keys: PromptKeys
    tokenizer: Tokenizer
    required: frozenset[PromptField] = frozenset()


class Row(NamedTuple):
    """A good row, not yet tokenized. ``id`` is None unless the row gives one."""

    id: str | None
    text: str
    answer: str | None
    demonstration: str | None
    task: str
    metadata: dict[str, Any]


class BadRow(Exception):
    """What is wrong with a row, and the 0-based character where."""

    def __init__(self, what: str, text: str = "", column: int = 0) -> None:
        super().__init__(what)
        self.text = text
        self.column = column

    def report(self, path: Path, line: int) -> str:
        shown = f": {excerpt(self.text, self.column)}" if self.text else ""
        return f"{path}:{line}:{self.column + 1} {self}{shown}"


class JsonlPrompts:
    """The good rows of one file, by index. Opening raises DataError when there are more bad rows than are allowed."""

    def __init__(self, path: Path, rules: RowRules, bad_rows: BadRows, max_bad_rows: int) -> None:
        self._path = path
        self._rules = rules
        self._offsets, self._lines, reports, num_bad = _scan(path, rules)
        self.num_skipped_rows = num_bad
        self.skip_report = ""
        num_rows = len(self._offsets) + num_bad
        if num_rows == 0:
            raise DataError("MRL-2002", f"{path}: the file is empty. Give one JSON object per line.")
        if num_bad == 0:
            return
        if num_bad > len(reports):
            reports.append(f"and {num_bad - len(reports)} more")
        listing = "\n  ".join(reports)
        count = f"{num_bad:,} bad {'row' if num_bad == 1 else 'rows'} of {num_rows:,}"
        if bad_rows == "error":
            raise DataError(
                "MRL-2001", f"{listing}\n{count}. Fix them, or set data.bad_rows=skip (limit data.max_bad_rows)."
            )
        if len(self._offsets) == 0:
            raise DataError("MRL-2002", f"{listing}\n{count}: nothing is left to train on.")
        if num_bad > max_bad_rows:
            raise DataError("MRL-2003", f"{listing}\n{count}, more than data.max_bad_rows={max_bad_rows}.")
        self.skip_report = f"{count} skipped:\n  {listing}"

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        line = int(self._lines[index])
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[index]))
            raw = file.readline()
        try:
            row = parse_row(raw, self._rules)
        except BadRow as bad:
            raise DataError(
                "MRL-2005", f"{bad.report(self._path, line)}\nThe file was changed while the run was using it."
            ) from bad
        return Prompt(
            id=row.id if row.id is not None else f"{self._path.name}:{line}",
            text=row.text,
            token_ids=self._rules.tokenizer.encode(row.text),
            answer=row.answer,
            demonstration=row.demonstration,
            task=row.task,
            metadata=row.metadata,
        )


def open_jsonl(path: Path, rules: RowRules, bad_rows: BadRows, max_bad_rows: int, where: str) -> JsonlPrompts:
    """Open a file named by the user under the config key ``where``."""
    if not path.is_file():
        problem = "is a directory, not a file" if path.is_dir() else "does not exist"
        raise MissingInputError("MRL-4102", f"{where}={str(path)!r} {problem}. Give a JSONL file or a builtin: name.")
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if start == _GZIP or path.suffix == ".gz":
            raise DataError("MRL-2006", f"{where}={str(path)!r} is compressed. Unpack it first: gunzip --keep {path}")
        return JsonlPrompts(path, rules, bad_rows, max_bad_rows)
    except OSError as error:
        raise MissingInputError("MRL-4102", f"{where}={str(path)!r} cannot be read ({error.strerror}).") from error


def parse_row(raw: bytes, rules: RowRules) -> Row:
    """One line of the file. Raises `BadRow` for the first thing that is wrong with it."""
    try:
        text = raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        before = len(raw[: error.start].decode("utf-8"))
        raise BadRow("not UTF-8", raw.decode("utf-8", "backslashreplace").rstrip("\r\n"), before) from error
    row = _parse_json(text)
    keys = rules.keys
    prompt = _text(row, keys.prompt, text, rules)
    if prompt is None:
        raise BadRow(f'key "{keys.prompt}" is missing', text)
    if not prompt.strip():
        raise BadRow(f'key "{keys.prompt}" is empty', text, _column(keys.prompt, text))
    answer = _text_or_number(row, keys.answer, text)
    if answer is None and "answer" in rules.required:
        raise BadRow(f'key "{keys.answer}" is missing, and this run needs it', text)
    demonstration = _text(row, keys.demonstration, text, rules)
    if demonstration is None and "demonstration" in rules.required:
        raise BadRow(f'key "{keys.demonstration}" is missing, and this run needs it', text)
    task = row.get(_TASK)
    if task is not None and not isinstance(task, str):
        raise _wrong(row, _TASK, text, "must be a string")
    explicit_id = _text_or_number(row, _ID, text)
    for key in (keys.prompt, keys.answer, keys.demonstration, _TASK, _ID):
        row.pop(key, None)
    return Row(explicit_id, prompt, answer, demonstration, task or "default", metadata=row)


def _scan(path: Path, rules: RowRules) -> tuple[np.ndarray, np.ndarray, list[str], int]:
    """Check every row: byte offsets and lines of the good ones, the first few reports and the number of bad ones."""
    offsets: list[int] = []
    lines: list[int] = []
    reports: list[str] = []
    line_of_id: dict[str, int] = {}
    blank_lines: list[int] = []
    num_bad = 0

    def reject(bad: BadRow, line: int) -> None:
        nonlocal num_bad
        num_bad += 1
        if len(reports) < _MAX_REPORTS:
            reports.append(bad.report(path, line))

    with path.open("rb") as file:
        offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
        file.seek(offset)
        for line, raw in enumerate(file, start=1):
            start, offset = offset, offset + len(raw)
            if not raw.strip():
                blank_lines.append(line)
                continue
            # Blank lines at the very end are no rows; followed by a row they are.
            for blank in blank_lines:
                reject(BadRow("the line is empty"), blank)
            blank_lines.clear()
            try:
                row = parse_row(raw, rules)
                if row.id is not None and line_of_id.setdefault(row.id, line) != line:
                    raise BadRow(f'key "{_ID}" repeats the id of line {line_of_id[row.id]}', row.id)
            except BadRow as bad:
                reject(bad, line)
            else:
                offsets.append(start)
                lines.append(line)
    return np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64), reports, num_bad


def _parse_json(text: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(text)
    except BadRow as bad:
        literal = str(bad).split()[0]
        raise BadRow(str(bad), text, max(0, text.find(literal))) from None
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON ({error.msg})", text, error.pos) from None
    except ValueError as error:  # a whole number beyond Python's limit of digits
        raise BadRow(f"not valid JSON ({error})", text) from None
    except RecursionError:
        raise BadRow("nested too deeply", text) from None
    if not isinstance(row, dict):
        raise BadRow(f"must be a JSON object, not {_type_name(row)}", text)
    return row


def _text(row: dict[str, Any], key: str, text: str, rules: RowRules) -> str | None:
    """A string that the tokenizer can encode; None when the key is absent. Only optional keys may be null."""
    value = row.get(key)
    if value is None and (key not in row or key != rules.keys.prompt):
        return None
    if not isinstance(value, str):
        raise _wrong(row, key, text, "must be a string")
    problem = rules.tokenizer.why_not_encodable(value)
    if problem is not None:
        raise BadRow(f'key "{key}" cannot be encoded. {problem}', text, _column(key, text))
    return value


def _text_or_number(row: dict[str, Any], key: str, text: str) -> str | None:
    value = row.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong(row, key, text, "must be a string or a number")
    return str(value)


def _wrong(row: dict[str, Any], key: str, text: str, rule: str) -> BadRow:
    return BadRow(f'key "{key}" {rule}, not {_type_name(row[key])}', text, _column(key, text))


def _column(key: str, text: str) -> int:
    """Where the key stands in the row."""
    found = re.search(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)
    return found.start() if found else 0


def _type_name(value: object) -> str:
    if value is None:
        return "null"
    names = {
        str: "a string",
        bool: "true or false",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
    }
    return names[type(value)]


def _refuse_constant(literal: str) -> NoReturn:
    raise BadRow(f"{literal} is not JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise BadRow(f"{literal} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
