"""Parquet: the same rows as JSONL give the same prompts, and bad ones are found and located."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from megarl.core.errors import DataError
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import BadRowPolicy, PromptKeys, PromptSource, open_prompts
from megarl.data.tokenizer import load_tokenizer

ENCODER = PromptEncoder(load_tokenizer("builtin:characters"))


def write(path: Path, rows: list[dict[str, Any]], row_group_size: int = 2) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def open_rows(path: Path, rows: list[dict[str, Any]], **options: Any) -> PromptSource:
    return open_prompts(str(write(path, rows)), ENCODER, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.parquet"


def test_prompts_are_those_of_the_same_rows_in_jsonl(file: Path) -> None:
    """Several row groups and several batches, in any order."""
    rows = [
        {"prompt": f"{i}+1=", "answer": i + 1, "id": f"n{i}", "level": {"deep": [i, 0.5]}, "task": "sums"}
        for i in range(2500)
    ]
    lines = file.with_suffix(".jsonl")
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write(file, rows, row_group_size=300)
    packed, plain = open_prompts(str(file), ENCODER), open_prompts(str(lines), ENCODER)
    assert len(packed) == len(plain) == 2500
    for index in (2499, 0, 1023, 1024, 299, 300, 1777):
        one, other = packed[index], plain[index]
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.id, one.text, one.answer, one.task, one.metadata) == (
            other.id, other.text, other.answer, other.task, other.metadata,
        )  # fmt: skip
    with pytest.raises(IndexError):
        packed[2500]


def test_a_name_does_not_make_a_format(tmp_path: Path) -> None:
    named_wrong = write(tmp_path / "rows.jsonl", [{"prompt": "1="}])
    assert open_prompts(str(named_wrong), ENCODER)[0].id == "rows.jsonl:1"
    text = tmp_path / "rows.parquet"
    text.write_text('{"prompt": "1="}\n')
    with pytest.raises(DataError, match="MRL-2010"):
        open_prompts(str(text), ENCODER)


BAD = {
    "null": ({"prompt": None}, 'column "prompt" must be a string or a list of messages, not null'),
    "empty": ({"prompt": " "}, 'column "prompt" is empty'),
    "character": ({"prompt": "1=\n"}, 'column "prompt" cannot be encoded'),
    "no number": ({"prompt": "1=", "level": float("nan")}, 'column "level" holds a number that is not finite'),
    "repeated id": ({"prompt": "1=", "id": "a"}, "column \"id\" repeats the id of row 1: 'a'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_located_by_row_and_column(file: Path, name: str) -> None:
    row, what = BAD[name]
    good = {"prompt": "2=", "level": 1.0}
    rows = [{**good, "id": "a"}, {**good, "id": "b"}, {**good, "id": "c", **row}]
    with pytest.raises(DataError) as caught:
        open_rows(file, rows)
    assert str(caught.value).startswith(f"MRL-2001 {file}:3 {what}")
    source = open_rows(file, rows, policy=BadRowPolicy("skip"))
    assert [source[i].id for i in range(len(source))] == ["a", "b"]
    assert source.num_skipped_rows == 1


def test_messages_lose_the_fields_that_they_do_not_use(file: Path) -> None:
    """All messages of a column have the same fields; what one lacks is null in the file."""
    system, user = {"role": "system", "content": "be brief", "name": "x"}, {"role": "user", "content": "1="}
    write(file, [{"prompt": [system, user]}])

    class Rendered(PromptEncoder):
        def encode(self, content: Any) -> Any:
            assert list(content) == [system, user]
            return super().encode("rendered")

    prompt = open_prompts(str(file), Rendered(ENCODER.tokenizer))[0]
    assert prompt.messages == (system, user)
    assert prompt.text == "system: be brief\nuser: 1="


def test_a_missing_column_is_told_with_those_that_are_there(file: Path) -> None:
    with pytest.raises(DataError, match=r'MRL-2011 .*no column of text "prompt"\. Its columns: question \(string\)'):
        open_rows(file, [{"question": "1="}])
    with pytest.raises(DataError, match=r'no column of text "answer"'):
        open_rows(file, [{"prompt": "1="}], required=frozenset({"answer"}))


def test_columns_that_json_cannot_hold_are_left_out_and_named(file: Path) -> None:
    source = open_rows(file, [{"prompt": "1=", "when": datetime.date(2026, 1, 1), "raw": b"\x00", "level": 1}])
    assert source[0].metadata == {"level": 1}
    assert "left out columns that JSON has no values for: when, raw" in source.skip_report


def test_final_answers_are_taken_out_of_worked_ones(file: Path) -> None:
    keys = PromptKeys("question", answer_after="####")
    prompt = open_rows(file, [{"question": "1=", "answer": "long way\n#### 1,200"}], keys=keys)[0]
    assert (prompt.answer, prompt.metadata) == ("1200", {"answer": "long way\n#### 1,200"})


def test_a_damaged_file_is_named(file: Path) -> None:
    write(file, [{"prompt": f"{i}="} for i in range(100)])
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"MRL-2010 .*not a readable Parquet file"):
        open_prompts(str(file), ENCODER)


def test_nothing_is_left_in_the_temporary_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    source = open_rows(file, [{"prompt": "1="}])
    assert source[0].text == "1="
    assert list(scratch.iterdir()) == []


def test_pyarrow_is_imported_only_for_parquet(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1="}\n')
    program = (
        "import sys\n"
        "from megarl.data.encoder import PromptEncoder\n"
        "from megarl.data.prompts import open_prompts\n"
        "from megarl.data.tokenizer import load_tokenizer\n"
        f"open_prompts({str(rows)!r}, PromptEncoder(load_tokenizer('builtin:characters')))\n"
        "assert 'pyarrow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
