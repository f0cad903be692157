"""Reading one YAML document into `Node`s, by YAML 1.2 rules and without any of YAML's traps.

``1e-6`` is a number; ``yes``, ``no``, ``on`` and ``off`` are text; a key may be given once; anchors, aliases and tags
are refused. The parser's events are read directly: no object is ever constructed from a tag, and depth is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NoReturn

import yaml

from megarl.config.problems import COMMAND_LINE, KeyPath, Problem, Source, dotted, raise_problems, show
from megarl.config.secret_names import is_secret_key
from megarl.config.tree import Node, Scalar

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32

NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
# No leading zeros: 010 is eight to some readers and ten to others, so it stays text and fails as a number. Forty digits
# are more than any setting needs and keep conversion cheap.
INT = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,39})\Z")
FLOAT = re.compile(
    r"(?:[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)|\.[0-9]+(?:[eE][-+]?[0-9]+)?)"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)


def read_scalar(text: str) -> Scalar:
    """What an unquoted scalar means."""
    if NULL.match(text):
        return None
    if BOOL.match(text):
        return text[0] in "tT"
    if INT.match(text):
        return int(text)
    if FLOAT.match(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def parse_document(text: str, file: str, problems: list[Problem]) -> Node | None:
    """The document's root, or None for a document without content. Appends what is wrong but can be read over.

    Raises a `ConfigError` when the text is not YAML at all.
    """
    try:
        return _Builder(text, file, problems).build()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else file
        column = f" at column {mark.column + 1}" if mark else ""
        _refuse(where, f"is not valid YAML{column}: {error.problem or error.context}.", _hint(error))
    except yaml.YAMLError as error:
        _refuse(file, f"is not valid YAML: {show(str(error).splitlines()[0])}.")
    except (ValueError, OverflowError) as error:  # PyYAML lets bad escapes and bad directives escape as these
        _refuse(file, f"is not valid YAML: {show(str(error))}.")


def decode(raw: bytes, file: str) -> str:
    """UTF-8 text, with or without a byte order mark."""
    if len(raw) > MAX_BYTES:
        _refuse(file, f"is larger than {MAX_BYTES // 1024} KiB, so it is not a configuration.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        _refuse(f"{file}:{line}", f"is not UTF-8 text (byte 0x{raw[error.start]:02x}).", "Save the file as UTF-8.")


def _refuse(where: str, text: str, *hints: str) -> NoReturn:
    raise_problems([Problem("MRL-1006", text, hints=tuple(hint for hint in hints if hint), where=where)])


def _hint(error: yaml.MarkedYAMLError) -> str:
    if "'\\t'" in str(error.problem):
        return "Indent with spaces; YAML does not allow tabs."
    if "mapping values are not allowed" in str(error.problem):
        return 'Check the indentation, and put text that contains ": " in quotes.'
    return ""


class _Builder:
    """Consumes the events of one document. ``problems`` collects what does not stop the reading."""

    def __init__(self, text: str, file: str, problems: list[Problem]) -> None:
        self._events: Iterator[yaml.Event] = iter(yaml.parse(text, Loader=yaml.SafeLoader))
        self._file = file
        self._problems = problems

    def build(self) -> Node | None:
        root = None
        num_documents = 0
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    self._stop(event, "starts a second document (---).", "Keep one document per file.")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, (), self._source(event))
        return None if root is None or root.value is None else root

    def _node(self, event: yaml.Event, path: KeyPath, source: Source) -> Node:
        if len(path) > MAX_DEPTH:
            self._stop(event, f"nests deeper than {MAX_DEPTH} levels.")
        self._refuse_references(event, path)
        if isinstance(event, yaml.ScalarEvent):
            text = self._text(event, path)
            return Node(read_scalar(text) if event.style is None else text, source)
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(self._sequence(path), source)
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self._mapping(path), source)
        return Node(None, source)  # an alias, already reported

    def _sequence(self, path: KeyPath) -> list[Node]:
        items: list[Node] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            items.append(self._node(event, (*path, str(len(items))), self._source(event)))
        return items

    def _mapping(self, path: KeyPath) -> dict[str, Node]:
        children: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                self._stop(event, "has a key that is not text.", "A key is a word, like lr or tp_size.")
            key = self._text(event, path)
            self._refuse_references(event, (*path, key))
            if key == "<<" and event.style is None:
                self._refuse(event, "uses a YAML merge key (<<).")
            node = self._node(next(self._events), (*path, key), self._source(event))
            if key in children:
                self._report_duplicate((*path, key), children[key], node)
            children[key] = node
        return children

    def _text(self, event: yaml.ScalarEvent, path: KeyPath) -> str:
        text = str(event.value)
        at = f" at {dotted(path)}" if path else ""
        if any("\ud800" <= character <= "\udfff" for character in text):
            self._stop(event, f"has half a character (a lone surrogate){at}.")
        if "\0" in text:  # no file name may have one, and no other setting needs one
            self._stop(event, f"has a NUL character{at}.")
        return text

    def _refuse_references(self, event: yaml.Event, path: KeyPath) -> None:
        at = f" at {dotted(path)}" if path else ""
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        if anchor is not None:
            kind = "alias" if isinstance(event, yaml.AliasEvent) else "anchor"
            self._refuse(event, f"uses the YAML {kind} {show(anchor)}{at}.")
        if tag is not None:
            self._refuse(event, f"uses the YAML tag {show(tag)}{at}.")

    def _refuse(self, event: yaml.Event, text: str) -> None:
        hint = "Anchors, aliases, merge keys and tags are not accepted. Write the value out, or use extends."
        self._problems.append(Problem("MRL-1008", text, hints=(hint,), where=str(self._source(event))))

    def _report_duplicate(self, path: KeyPath, first: Node, second: Node) -> None:
        values = ""
        is_plain = not isinstance(first.value, (dict, list)) and not isinstance(second.value, (dict, list))
        if is_plain and not is_secret_key(path[-1]):
            values = f" ({show(first.value)}, then {show(second.value)})"
        where = f"{first.source} and :{second.source.line}" if second.source.line else str(second.source)
        self._problems.append(Problem("MRL-1007", f"both set {dotted(path)}{values}. Keep one.", where=where))

    def _stop(self, event: yaml.Event, text: str, *hints: str) -> NoReturn:
        _refuse(str(self._source(event)), text, *hints)

    def _source(self, event: yaml.Event) -> Source:
        # A value from the command line has no line worth naming.
        if event.start_mark is None or self._file == COMMAND_LINE.file:
            return Source(self._file, 0)
        return Source(self._file, event.start_mark.line + 1)
