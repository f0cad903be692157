"""JSONL prompts: every bad row is found before training starts, and located."""

from __future__ import annotations

import gzip
import json
import os
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megarl.core.errors import ConfigError, DataError, MissingInputError
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import BadRowPolicy, PromptKeys, PromptSource, open_prompts
from megarl.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("builtin:characters")
ENCODER = PromptEncoder(TOKENIZER)
GOOD = '{"prompt": "1+1=", "answer": "2"}'


def open_text(path: Path, content: str | bytes, **options: Any) -> PromptSource:
    path.write_bytes(content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content)
    return open_prompts(str(path), ENCODER, **options)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "train.jsonl"


def test_rows_become_prompts(file: Path) -> None:
    rows = [
        {"prompt": "1+1=", "answer": 2, "level": 3, "nested": {"a": [1, None]}},
        {"id": 7, "prompt": "2+2=", "answer": "4", "demonstration": "2+2=4:4", "task": "sums"},
        {"prompt": "3+3=", "answer": 6.5, "demonstration": None},
    ]
    source = open_text(file, "\n".join(map(json.dumps, rows)))
    assert len(source) == 3
    first, second, third = source[0], source[1], source[2]
    assert (first.id, first.text, first.answer, first.task) == ("train.jsonl:1", "1+1=", "2", "default")
    assert first.metadata == {"level": 3, "nested": {"a": [1, None]}}
    assert first.token_ids.tolist() == TOKENIZER.encode("1+1=").tolist()
    assert (second.id, second.demonstration, second.task, second.metadata) == ("7", "2+2=4:4", "sums", {})
    assert (third.answer, third.demonstration) == ("6.5", None)
    with pytest.raises(IndexError):
        source[3]


def test_keys_can_be_renamed(file: Path) -> None:
    keys = PromptKeys(prompt="question", answer="solution", demonstration="solution")
    prompt = open_text(file, '{"question": "1+1=", "solution": "2", "answer": "other"}\n', keys=keys)[0]
    assert (prompt.text, prompt.answer, prompt.demonstration) == ("1+1=", "2", "2")
    assert prompt.metadata == {"answer": "other"}


@pytest.mark.parametrize(
    "content",
    [
        f"{GOOD}\n{GOOD}",
        f"{GOOD}\n{GOOD}\n",
        f"{GOOD}\r\n{GOOD}\r\n",
        f"{GOOD}\n{GOOD}\n\n  \n",
        b"\xef\xbb\xbf" + f"{GOOD}\n{GOOD}\n".encode(),
    ],
    ids=["no newline at the end", "newline", "CRLF", "blank lines at the end", "BOM"],
)
def test_line_endings_and_byte_order_marks_do_not_matter(file: Path, content: str | bytes) -> None:
    source = open_text(file, content)
    assert [source[i].text for i in range(len(source))] == ["1+1=", "1+1="]
    assert [source[i].id for i in range(len(source))] == ["train.jsonl:1", "train.jsonl:2"]


BAD_ROWS = {
    "cut": ('{"prompt": "1+1=", "ans', 20, "not valid JSON"),
    "missing comma": ('{"prompt": "1+1=" "answer": "2"}', 19, "not valid JSON"),
    "extra": (GOOD + "}", 34, "not valid JSON"),
    "list": ("[1, 2]", 1, "must be a JSON object, not a list"),
    "missing key": ('{"question": "1+1="}', 1, 'key "prompt" is missing'),
    "null": ('{"answer": "2", "prompt": null}', 17, 'key "prompt" must be a string or a list of messages, not null'),
    "number": ('{"prompt": 3}', 2, 'key "prompt" must be a string or a list of messages, not a number'),
    "no messages": ('{"prompt": []}', 2, 'key "prompt" is an empty list of messages'),
    "text as message": ('{"prompt": ["hi"]}', 2, 'key "prompt" has a message 1 that is not an object but a string'),
    "no role": ('{"prompt": [{"content": "hi"}]}', 2, 'key "prompt" has a message 1 without a "role"'),
    "no content": ('{"prompt": [{"role": "user"}]}', 2, 'key "prompt" has a message 1 whose "content" is null'),
    "empty messages": ('{"prompt": [{"role": "user", "content": " "}]}', 2, 'key "prompt" has only empty messages'),
    "answered": (
        '{"prompt": [{"role": "user", "content": "1="}, {"role": "assistant", "content": "1"}]}',
        2,
        'key "prompt" ends with a message of the assistant',
    ),
    "foreign character in a message": (
        '{"prompt": [{"role": "user", "content": "1=\\n"}]}',
        2,
        'key "prompt" cannot be encoded',
    ),
    "empty prompt": ('{"prompt": ""}', 2, 'key "prompt" is empty'),
    "blank prompt": ('{"prompt": "  "}', 2, 'key "prompt" is empty'),
    "unknown character": ('{"prompt": "1+1=?\\n"}', 2, 'key "prompt" cannot be encoded'),
    "lone surrogate": ('{"prompt": "\\ud800"}', 2, 'key "prompt" cannot be encoded'),
    "true answer": ('{"prompt": "1=", "answer": true}', 18, 'key "answer" must be a string or a number, not true'),
    "object answer": ('{"prompt": "1=", "answer": {}}', 18, 'key "answer" must be a string or a number, not an object'),
    "number as demonstration": ('{"prompt": "1=", "demonstration": 1}', 18, 'key "demonstration" must be a string'),
    "list as id": ('{"prompt": "1=", "id": []}', 18, 'key "id" must be a string or a number'),
    "number as task": ('{"prompt": "1=", "task": 1}', 18, 'key "task" must be a string'),
    "NaN": ('{"prompt": "1=", "answer": NaN}', 28, "NaN is not JSON"),
    "minus infinity": ('{"prompt": "1=", "answer": -Infinity}', 28, "-Infinity is not JSON"),
    "overflow": ('{"prompt": "1=", "level": 1e999}', 27, "1e999 is too large a number"),
    "many digits": ('{"prompt": "1=", "level": ' + "1" * 5000 + "}", 1, "not valid JSON"),
    "deep": ("[" * 100_000, 1, "nested too deeply"),
    "blank line": ("", 1, "the line is empty"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_located(file: Path, name: str) -> None:
    row, column, what = BAD_ROWS[name]
    with pytest.raises(DataError) as caught:
        open_text(file, f"{GOOD}\n{row}\n{GOOD}\n")
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(f"MRL-2001 {file}:2:{column} {what}")
    assert rest == ["1 bad row of 3. Fix them, or set data.bad_rows=skip (limit data.max_bad_rows)."]
    assert caught.value.exit_code == 65


def test_bytes_that_are_not_utf8_are_located(file: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"{file}:1:13 not UTF-8: ")):
        open_text(file, b'{"prompt": "\xff1+1="}\n')


def test_a_repeated_id_names_both_lines(file: Path) -> None:
    with pytest.raises(DataError, match=re.escape(f"{file}:3:1 key \"id\" repeats the id of line 1: 'a'")):
        open_text(file, '{"id": "a", "prompt": "1="}\n{"prompt": "2="}\n{"id": "a", "prompt": "3="}\n')


def test_excerpts_are_short_escaped_and_near_the_fault(file: Path) -> None:
    row = '{"prompt": "' + "a" * 500 + '", "note": "\x1b[31m red" oops' + "b" * 500
    with pytest.raises(DataError) as caught:
        open_text(file, row)
    line = str(caught.value).splitlines()[0]
    excerpt = line.rpartition("): ")[2]
    assert len(excerpt) <= 80
    assert "oops" in excerpt or "x1b" in excerpt
    assert line.isprintable()


def test_a_huge_row_is_a_row_and_a_huge_bad_row_is_told_in_one_line(file: Path) -> None:
    huge = "1" * 3_000_000
    assert len(open_text(file, f'{GOOD}\n{{"prompt": "{huge}"}}\n')[1].text) == len(huge)
    with pytest.raises(DataError, match=f"{file}:1:3000015 not valid JSON") as caught:
        open_text(file, f'{{"prompt": "{huge}" oops')
    assert len(str(caught.value)) < 500


def test_required_fields_are_checked_in_every_row(file: Path) -> None:
    content = f'{GOOD}\n{{"prompt": "1=", "answer": null}}\n'
    assert len(open_text(file, content)) == 2
    with pytest.raises(DataError, match=':2:18 key "answer" is missing, and this run needs it'):
        open_text(file, content, required=frozenset({"answer"}))
    with pytest.raises(DataError, match='key "demonstration" is missing'):
        open_text(file, content, required=frozenset({"demonstration"}))


def test_ten_bad_rows_are_shown_and_all_are_counted(file: Path) -> None:
    with pytest.raises(DataError) as caught:
        open_text(file, "\n".join(["{"] * 13 + [GOOD]))
    message = str(caught.value)
    assert message.count("not valid JSON") == 10
    assert "and 3 more" in message
    assert "13 bad rows of 14" in message


def test_skipping_counts_what_it_leaves_out(file: Path) -> None:
    content = "\n".join([GOOD, "{", '{"prompt": "2+2="}', "", '{"prompt": "3+3="}'])
    source = open_text(file, content, policy=BadRowPolicy("skip", 2))
    assert [source[i].text for i in range(len(source))] == ["1+1=", "2+2=", "3+3="]
    assert source[2].id == "train.jsonl:5", "ids keep the line of the file"
    assert source.num_skipped_rows == 2
    assert "2 bad rows of 5 skipped" in source.skip_report
    with pytest.raises(DataError, match=r"more than data.max_bad_rows=1"):
        open_text(file, content, policy=BadRowPolicy("skip", 1))


@pytest.mark.parametrize(
    ("content", "policy"), [("", "error"), ("\n\n", "error"), ("{\n[]\n", "skip")], ids=["empty", "blank", "only bad"]
)
def test_a_file_without_a_good_row_is_an_error(file: Path, content: str, policy: str) -> None:
    with pytest.raises(DataError, match="MRL-2002"):
        open_text(file, content, policy=BadRowPolicy(policy))


def test_a_compressed_file_is_refused_with_a_hint(file: Path, tmp_path: Path) -> None:
    for path in (file, tmp_path / "train.jsonl.gz"):
        with pytest.raises(DataError, match="gunzip"):
            open_text(path, gzip.compress(GOOD.encode()))


def test_missing_files_and_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match=r"data.eval=.*does not exist"):
        open_prompts(str(tmp_path / "none.jsonl"), ENCODER, where="data.eval")
    with pytest.raises(MissingInputError, match="is a directory"):
        open_prompts(str(tmp_path), ENCODER)
    with pytest.raises(ConfigError, match="builtin:carry, builtin:carry_held_out, builtin:sort, builtin:sort_held_out"):
        open_prompts("builtin:gsm8k", ENCODER)


def test_a_file_that_changes_under_the_run_is_noticed(file: Path) -> None:
    source = open_text(file, f"{GOOD}\n{GOOD}\n")
    file.write_text(f"  {GOOD}\n{GOOD}\n")
    with pytest.raises(DataError, match="MRL-2005"):
        source[1]


def test_a_file_that_changes_to_other_good_rows_is_noticed_and_one_that_is_only_touched_is_not(file: Path) -> None:
    source = open_text(file, f"{GOOD}\n{GOOD}\n")
    file.write_text(f"{GOOD}\n{GOOD}\n")
    os.utime(file, (1, 1))
    assert source[1].answer == "2"
    file.write_text(f"{GOOD}\n{GOOD}\n".replace("2", "3"))
    with pytest.raises(DataError, match="MRL-2005"):
        source[1]


def test_an_open_file_takes_a_few_bytes_per_row(file: Path) -> None:
    """Offsets, lines and the hashes of ids; and while it is read, a row at a time."""
    num_rows = 5000
    rows = (json.dumps({"prompt": "1=", "id": f"row {i}", "note": "x" * 1000}) for i in range(num_rows))
    file.write_text("\n".join(rows))
    open_prompts(str(file), ENCODER)  # what is made once is not counted
    tracemalloc.start()
    try:
        source = open_prompts(str(file), ENCODER)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(source) == num_rows
    assert kept < 24 * num_rows, "two numbers of 8 bytes, and the object itself"
    assert peak < 250 * num_rows, "a quarter of the file, most of it to sort the hashes"
