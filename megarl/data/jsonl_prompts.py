"""Prompts from a JSONL file: every row is checked when the file is opened, and read again only when it is wanted.

Only the byte offset and the line number of each good row stay in memory. A row is bad for one of the reasons in
`read_row`, because it is no JSON object, or because its explicit id was used before.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt
from megarl.data.content import FileContent
from megarl.data.rejected import BadRowPolicy, RejectedRows, SeenIds
from megarl.data.rows import ID, BadRow, Row, RowRules, read_row, type_name

_BOM = b"\xef\xbb\xbf"


class BadLine(Exception):
    """What is wrong with a line, and the 0-based character where."""

    def __init__(self, what: str, text: str = "", column: int = 0) -> None:
        super().__init__(what)
        self.text = text
        self.column = column

    def report(self, path: Path, line: int) -> str:
        """File, line and column, what is wrong, and the text near it."""
        shown = f": {excerpt(self.text, self.column)}" if self.text else ""
        return f"{path}:{line}:{self.column + 1} {self}{shown}"


class JsonlPrompts:
    """The good rows of one file, by index. Opening raises DataError when there are more bad rows than are allowed."""

    def __init__(self, path: Path, rules: RowRules, policy: BadRowPolicy) -> None:
        self._path = path
        self._rules = rules
        self._content = FileContent(path)
        self._offsets = np.zeros(0, dtype=np.int64)
        self._lines = np.zeros(0, dtype=np.int64)
        rejected = self._scan()
        self.num_skipped_rows = rejected.num_rows
        self.skip_report = rejected.settle(len(self), policy)

    @property
    def content_hash(self) -> str:
        """Of the file's bytes."""
        return self._content.sha256

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        self._content.require_same()
        return self._row(index).to_prompt(f"{self._path.name}:{self._lines[index]}", self._rules.encoder)

    def _row(self, index: int) -> Row:
        with self._path.open("rb") as file:
            file.seek(int(self._offsets[index]))
            raw = file.readline()
        try:
            return parse_line(raw, self._rules)
        except BadLine as bad:
            raise self._content.changed(bad.report(self._path, int(self._lines[index]))) from bad

    def _scan(self) -> RejectedRows:
        """Check every line, and remember where the good ones are."""
        rejected, ids = RejectedRows(self._path), SeenIds()
        offsets, lines, blank_lines = array("q"), array("q"), array("q")
        with self._path.open("rb") as file:
            offset = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
            file.seek(offset)
            for line, raw in enumerate(file, start=1):
                start, offset = offset, offset + len(raw)
                if not raw.strip():
                    blank_lines.append(line)
                    continue
                # Blank lines at the very end are no rows; followed by a row they are.
                for blank in blank_lines:
                    rejected.add(BadLine("the line is empty").report(self._path, blank))
                del blank_lines[:]
                try:
                    row = parse_line(raw, self._rules)
                except BadLine as bad:
                    rejected.add(bad.report(self._path, line))
                    continue
                if row.id is not None:
                    ids.add(len(offsets), row.id)
                offsets.append(start)
                lines.append(line)
        self._offsets, self._lines = np.array(offsets, dtype=np.int64), np.array(lines, dtype=np.int64)
        self._reject_repeated(ids, rejected)
        return rejected

    def _reject_repeated(self, ids: SeenIds, rejected: RejectedRows) -> None:
        repeated = []
        for index, earlier in ids.candidates():
            row_id = self._row(index).id
            if row_id is not None and row_id == self._row(earlier).id:
                bad = BadLine(f'key "{ID}" repeats the id of line {self._lines[earlier]}', row_id)
                rejected.add(bad.report(self._path, int(self._lines[index])))
                repeated.append(index)
        self._offsets, self._lines = np.delete(self._offsets, repeated), np.delete(self._lines, repeated)


def parse_line(raw: bytes, rules: RowRules) -> Row:
    """One line of the file. Raises `BadLine` for the first thing that is wrong with it."""
    try:
        text = raw.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        before = len(raw[: error.start].decode("utf-8"))
        raise BadLine("not UTF-8", raw.decode("utf-8", "backslashreplace").rstrip("\r\n"), before) from error
    row = _parse_json(text)
    try:
        return read_row(row, rules)
    except BadRow as bad:
        raise BadLine(f'key "{bad.key}" {bad}', text, _column(bad.key, text)) from None


def _parse_json(text: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(text)
    except _NotJson as error:
        raise BadLine(str(error), text, max(0, text.find(error.literal))) from None
    except json.JSONDecodeError as error:
        raise BadLine(f"not valid JSON ({error.msg})", text, error.pos) from None
    except ValueError as error:  # a whole number beyond Python's limit of digits
        raise BadLine(f"not valid JSON ({error})", text) from None
    except RecursionError:
        raise BadLine("nested too deeply", text) from None
    if not isinstance(row, dict):
        raise BadLine(f"must be a JSON object, not {type_name(row)}", text)
    return row


def _column(key: str, text: str) -> int:
    """Where the key stands in the row."""
    found = re.search(re.escape(json.dumps(key, ensure_ascii=False)) + r"\s*:", text)
    return found.start() if found else 0


class _NotJson(Exception):
    """A number that Python's decoder takes and JSON does not have."""

    def __init__(self, literal: str, what: str) -> None:
        super().__init__(f"{literal} {what}")
        self.literal = literal


def _refuse_constant(literal: str) -> NoReturn:
    raise _NotJson(literal, "is not JSON")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise _NotJson(literal, "is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
