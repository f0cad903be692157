"""Prompts from a Parquet file.

Parquet cannot be read row by row, only a row group at a time, and a shuffled run wants a row from anywhere at any time.
So the one pass that checks every row also unpacks the file into a nameless temporary file (in TMPDIR) that is mapped
into memory: any row is then at hand, and the system may drop its pages whenever it likes.
"""

from __future__ import annotations

import math
import mmap
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.core.errors import DataError, MissingInputError, StorageError
from megarl.core.excerpt import excerpt
from megarl.core.sample import Prompt
from megarl.data.content import FileContent
from megarl.data.rejected import BadRowPolicy, RejectedRows, SeenIds
from megarl.data.rows import ID, BadRow, Row, RowRules, read_row

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]

MAGIC = b"PAR1"
_BATCH_ROWS = 1024
_BUFFER_BYTES = 2**18


class ParquetPrompts:
    """The good rows of one file, by index. Opening raises DataError when there are more bad rows than are allowed."""

    def __init__(self, path: Path, rules: RowRules, policy: BadRowPolicy) -> None:
        self._path = path
        self._rules = rules
        self.content_hash = FileContent(path).sha256
        self._unpacked = _Unpacked(path, rules)
        self._rows = np.zeros(0, dtype=np.int64)
        rejected = self._scan()
        self.num_skipped_rows = rejected.num_rows
        left_out = self._unpacked.left_out
        columns = f"{path}: left out columns that JSON has no values for: {', '.join(left_out)}." if left_out else ""
        self.skip_report = "\n".join(part for part in (rejected.settle(len(self), policy), columns) if part)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._row(int(self._rows[index])).to_prompt(self._place(int(self._rows[index])), self._rules.encoder)

    def _place(self, row: int) -> str:
        return f"{self._path.name}:{row + 1}"

    def _row(self, row: int) -> Row:
        return read_row(self._unpacked.row(row), self._rules)

    def _scan(self) -> RejectedRows:
        rejected, ids, good = RejectedRows(self._path), SeenIds(), array("q")
        for number, content in enumerate(self._unpacked.unpack()):
            try:
                row = read_row(content, self._rules)
                _require_finite(content)
            except BadRow as bad:
                rejected.add(self._report(number, bad, content.get(bad.key)))
                continue
            if row.id is not None:
                ids.add(number, row.id)
            good.append(number)
        repeated = []
        for number, earlier in ids.candidates():
            row_id = self._row(number).id
            if row_id == self._row(earlier).id:
                rejected.add(self._report(number, BadRow(f"repeats the id of row {earlier + 1}", ID), row_id))
                repeated.append(number)
        self._rows = np.setdiff1d(np.array(good, dtype=np.int64), np.array(repeated, dtype=np.int64))
        return rejected

    def _report(self, number: int, bad: BadRow, value: object) -> str:
        """File, 1-based row and column, what is wrong, and the value."""
        shown = f": {excerpt(str(value))}" if value is not None else ""
        return f'{self._path}:{number + 1} column "{bad.key}" {bad}{shown}'


class _Unpacked:
    """The columns of a Parquet file that prompts are made of, uncompressed and mapped into memory."""

    def __init__(self, path: Path, rules: RowRules) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        self._path = path
        try:
            # what is buffered ahead would be the whole file
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, error) from error
        schema = self._file.schema_arrow
        self._kept = [field.name for field in schema if _is_plain(field.type)]
        self.left_out = [name for name in schema.names if name not in self._kept]
        checked = set(rules.keys.all) | {field.name for field in schema if _has_floats(field.type)}
        self._checked = [name for name in self._kept if name in checked]
        self._prompt = rules.keys.prompt
        needed = [rules.keys.prompt, *(getattr(rules.keys, field) for field in sorted(rules.required))]
        missing = [name for name in needed if name not in self._kept]
        if missing:
            has = ", ".join(f"{field.name} ({field.type})" for field in schema)
            raise DataError(
                "MRL-2011",
                f'{path} has no column of text "{missing[0]}". Its columns: {has}.\n'
                "Name the right ones with data.prompt_key, data.answer_key and data.demonstration_key.",
            )
        self._starts: list[int] = []
        self._batches: list[Any] = []

    def unpack(self) -> Iterator[dict[str, Any]]:
        """What has to be checked of every row, once; afterwards `row` may be called."""
        import pyarrow as pa

        with tempfile.TemporaryFile(prefix="megarl-parquet-") as spool:
            num_rows = 0
            try:
                batches = self._file.iter_batches(_BATCH_ROWS, columns=self._kept, use_threads=False)
                schema = pa.schema([self._file.schema_arrow.field(name) for name in self._kept])
                with pa.ipc.new_file(spool, schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                        self._starts.append(num_rows)
                        num_rows += batch.num_rows
                        for row in batch.select(self._checked).to_pylist():
                            yield _without_nulls(row, self._prompt)
                spool.flush()
                mapped = mmap.mmap(spool.fileno(), 0, access=mmap.ACCESS_READ)
            except pa.ArrowException as error:
                raise _damaged(self._path, error) from error
            except OSError as error:
                raise StorageError(
                    "MRL-2012",
                    f"{self._path} cannot be unpacked into {tempfile.gettempdir()}: {error.strerror or error}.\n"
                    "Free some space there, or set TMPDIR to a directory with more.",
                ) from error
        self._file.close()
        pa.default_memory_pool().release_unused()
        reader = pa.ipc.open_file(pa.py_buffer(mapped))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]

    def row(self, number: int) -> dict[str, Any]:
        """A whole row, 0-based."""
        batch = int(np.searchsorted(self._starts, number, side="right")) - 1
        (row,) = self._batches[batch].slice(number - self._starts[batch], 1).to_pylist()
        return _without_nulls(row, self._prompt)


def _damaged(path: Path, error: Exception) -> DataError | MissingInputError:
    if isinstance(error, PermissionError):
        return MissingInputError("MRL-4102", f"{path} cannot be read ({error.strerror}).")
    return DataError("MRL-2010", f"{path} is not a readable Parquet file ({excerpt(str(error))}).")


def _is_plain(kind: pa.DataType) -> bool:
    """Whether JSON can hold every value of the type."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    if types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    kinds = (types.is_string, types.is_large_string, types.is_boolean, types.is_integer, types.is_floating)
    return types.is_null(kind) or any(test(kind) for test in kinds)


def _has_floats(kind: pa.DataType) -> bool:
    from pyarrow import types

    if types.is_struct(kind):
        return any(_has_floats(kind.field(i).type) for i in range(kind.num_fields))
    nested = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return _has_floats(kind.value_type) if nested else bool(types.is_floating(kind))


def _without_nulls(row: dict[str, Any], prompt: str) -> dict[str, Any]:
    """All messages of a column have the same fields; those that a message does not use are null."""
    messages = row.get(prompt)
    if isinstance(messages, list):
        row[prompt] = [
            {key: value for key, value in message.items() if value is not None}
            if isinstance(message, dict)
            else message
            for message in messages
        ]
    return row


def _require_finite(row: dict[str, Any]) -> None:
    """NaN has no place in JSON, which is how prompts are recorded and reach reward functions."""
    for key, value in row.items():
        if not _is_finite(value):
            raise BadRow("holds a number that is not finite", key)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list) else True
