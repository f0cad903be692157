"""YAML's traps: each is either read as a person means it, or refused with one clear message."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.document import MAX_BYTES, decode, parse_document, read_scalar
from megarl.config.load import load_config
from megarl.config.problems import Problem
from megarl.config.tree import plain
from megarl.core.errors import ConfigError


def parse(text: str) -> object:
    problems: list[Problem] = []
    node = parse_document(text, "run.yaml", problems)
    assert problems == []
    assert node is not None
    return plain(node)


def findings(text: str) -> list[str]:
    problems: list[Problem] = []
    parse_document(text, "run.yaml", problems)
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e-6", 1e-6),
        ("1E5", 1e5),
        ("1e5", 1e5),
        (".5e-3", 0.5e-3),
        ("+1.5e+3", 1500.0),
        ("-2.", -2.0),
        ("0.1", 0.1),
        ("6.0e-4", 6e-4),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        ("7", 7),
        ("-7", -7),
        ("0", 0),
    ],
)
def test_numbers_are_numbers(text: str, number: float) -> None:
    value = read_scalar(text)
    assert value == number
    assert type(value) is type(number)


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "no",
        "on",
        "off",
        "Yes",
        "NO",
        "y",
        "n",
        "010",
        "0x10",
        "0o7",
        "1_000",
        "1:30",
        "12:30:45",
        "2024-01-01",
        "1e",
        "e5",
        "1.2.3",
        "--1",
        "1 000",
        "nan",
        "inf",
        "None",
        "=",
        "1" * 41,
    ],
)
def test_what_only_some_readers_take_for_a_number_or_boolean_is_text(text: str) -> None:
    assert read_scalar(text) == text


def test_nan_is_read_so_that_it_can_be_refused_by_name() -> None:
    value = read_scalar(".nan")
    assert isinstance(value, float)
    assert math.isnan(value)


@given(st.floats(allow_nan=False))
def test_every_float_that_python_writes_is_read_back(number: float) -> None:
    text = repr(number).replace("inf", ".inf")
    assert read_scalar(text) == number


def test_quotes_make_text() -> None:
    assert parse("a: '1e-6'\nb: \"true\"\nc: 'null'\n") == {"a": "1e-6", "b": "true", "c": "null"}


def test_booleans_and_nulls() -> None:
    assert parse("a: true\nb: False\nc: null\nd: ~\ne:\n") == {"a": True, "b": False, "c": None, "d": None, "e": None}


def test_windows_line_ends_and_byte_order_mark_are_accepted() -> None:
    raw = b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n"
    assert parse(decode(raw, "run.yaml")) == {"a": 1, "b": {"c": 2}}


def test_duplicates_are_reported_with_both_lines_and_values() -> None:
    assert findings("a: 1\nrollout:\n  n: 512\n  m: 1\n  n: 2048\n") == [
        "MRL-1007 run.yaml:3 and :5 both set rollout.n (512, then 2048). Keep one."
    ]


def test_all_duplicates_are_reported() -> None:
    assert len(findings("a: 1\na: 2\na: 3\nb: {c: 1, c: 2}\n")) == 3


@pytest.mark.parametrize(
    "text",
    [
        "a: !!python/object/apply:os.system ['true']\n",
        "a: !!python/name:os.system\n",
        "a: !!str 1\n",
        "a: !custom {b: 1}\n",
        "!!map {a: 1}\n",
        "!!str a: 1\n",
    ],
)
def test_tags_are_refused(text: str) -> None:
    (finding,) = findings(text)
    assert finding.startswith("MRL-1008 run.yaml:1 uses the YAML tag")


def test_anchors_aliases_and_merge_keys_are_refused() -> None:
    found = findings("base: &b {x: 1}\ncopy: *b\nmore:\n  <<: *b\n")
    assert [finding.split(" ")[1] for finding in found] == ["run.yaml:1", "run.yaml:2", "run.yaml:4", "run.yaml:4"]
    assert all(finding.startswith("MRL-1008") for finding in found)


def test_an_alias_bomb_is_not_expanded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 20)]
    problems: list[Problem] = []
    node = parse_document("\n".join(lines), "bomb.yaml", problems)
    assert node is not None
    # 9 aliases on each of 19 lines and 20 anchors: one finding each, and no value ever grew
    assert len(problems) == 9 * 19 + 20
    assert len(str(plain(node))) < 10_000


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("run:\n\tname: a\n", 2, "tabs"),
        ("run: {name: a\n", 2, "not valid YAML"),
        ("run: [1, 2\nmodel: 3\n", 2, "not valid YAML"),
        ("a: b: c\n", 1, "indentation"),
        ("a: 1\n  b: 2\n", 2, "indentation"),
        ("a: 'open\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "second document"),
        ("? [1, 2]\n: 3\n", 1, "key that is not text"),
        ("a: 1\n&x\n", 3, "not valid YAML"),
        ("a: " + "[" * 200, 1, "nests deeper"),
        ("- " * 100 + "x", 1, "nests deeper"),
    ],
)
def test_what_is_not_yaml_is_one_error_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_document(text, "run.yaml", [])
    assert str(error.value).startswith(f"MRL-1006 run.yaml:{line} ")
    assert words in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        'a: "\\ud800"\n',
        '"\\ud800": 1\n',
        'a: "b\\0c"\n',
        '"b\\0c": 1\n',
        'a: "\\U00110000"\n',
        "a: \x00\n",
        "a: \x07\n",
        "%YAML 9.9\n---\na: 1\n",
    ],
)
def test_strange_characters_and_directives_are_one_error(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_document(text, "run.yaml", [])
    assert error.value.code == "MRL-1006"


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"# only a comment\n", "empty"),
        (b"---\n", "empty"),
        (b"null\n", "empty"),
        (b"- a\n- b\n", "not a list"),
        (b"just text\n", 'not "just text"'),
        (b"42\n", "not 42"),
        (b"a: \xff\n", "not UTF-8"),
        ("run: {}\n".encode("utf-16"), "not UTF-8"),
        ("a: 'é'\n".encode("latin-1"), "not UTF-8"),
        (b"\x00\x00\x00\x00", "not valid YAML"),
        (b"a: 1\n" * 2_100_000, "larger than 256 KiB"),
        (b"\x93NUMPY\x01\x00", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_error(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert error.value.code == "MRL-1006"
    assert words in str(error.value)
    assert "1 problem. Nothing was started." in str(error.value)


def test_the_wrong_byte_is_located() -> None:
    with pytest.raises(ConfigError, match=r"run.yaml:3 is not UTF-8 text \(byte 0xff\)"):
        decode(b"a: 1\nb: 2\nc: \xff\n", "run.yaml")


def test_the_largest_allowed_file_is_read() -> None:
    filler = b"# " + b"x" * (MAX_BYTES - 8) + b"\na: 1"
    assert len(filler) == MAX_BYTES - 1
    assert parse(decode(filler, "run.yaml")) == {"a": 1}


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ConfigError):  # anything else that is raised fails the test
        parse_document(text, "run.yaml", [])
