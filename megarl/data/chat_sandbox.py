"""Where chat templates run: they come with a model, from anybody, and are programs.

The environment is the one that `transformers` renders templates in (Jinja's immutable sandbox, its options and its
extra functions), so that a template means the same here, with two differences. What would make two renderings differ
(the clock, random choices) is not there. And the work of a rendering is bounded: loops and calls are counted, texts may
not outgrow a limit, and the thread's processor time is watched at each of them.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_CHARACTERS = 2**22  # of a rendered conversation, or of any text on the way to it
MAX_STEPS = 50_000  # turns of loops, and calls
MAX_SECONDS = 10.0  # of processor time; a rendering takes less than a thousandth of it
_MAX_RANGE = 10_000
_MAX_INTEGER = 2**64
_VALUE_CHARACTERS = 8  # what a value that is no text counts for
# what can make much text out of little
_GROWING_METHODS = ("replace", "join", "ljust", "rjust", "center", "zfill", "expandtabs")
_FORMATS = ("format", "format_map")
_GROWING_FILTERS = (
    "batch", "center", "indent", "join", "pprint", "replace", "slice", "string", "sum", "tojson", "truncate",
    "urlize", "wordwrap", "xmlattr",
)  # fmt: skip
# what is not the same at each rendering, or has no other use than to be long
_LEFT_OUT_FILTERS, _LEFT_OUT_GLOBALS = ("random",), ("lipsum",)
# in a format: a width that would make a long text, or one that is given with the values
_WIDE = re.compile(r"\d{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


class RefusedByTemplate(TemplateError):
    """The template itself called ``raise_exception``: it does not take these messages."""


class TooMuchWork(Exception):
    """The template does more than any chat template has reason to."""


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox. ``date`` is what ``strftime_now`` tells; without one there is no such function.

    One rendering at a time (`begin` holds the lock for it): what was spent is counted in the environment.
    """

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, date: datetime.date | None) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # constants would be computed while compiling, where nothing is counted
            extensions=[_GenerationBlocks, LoopControls],
            finalize=self.shown,
        )
        self.rendering = threading.Lock()
        self._num_steps = 0
        self._start = 0.0
        self.filters["tojson"] = _tojson
        for name in _LEFT_OUT_FILTERS:
            del self.filters[name]
        for name in _LEFT_OUT_GLOBALS:
            del self.globals[name]
        for name in _GROWING_FILTERS:
            self.filters[name] = self._bounded(self.filters[name], _require_small_result)
        self.filters["format"] = self._bounded(self.filters["format"], _require_narrow)
        self.globals |= {"raise_exception": _raise_exception, "range": _range}
        if date is not None:
            self.globals["strftime_now"] = date.strftime

    def load_text(self, source: str, change_literal: Callable[[str], str]) -> Any:
        """The compiled template, with every literal of its own changed."""
        if len(source) > MAX_CHARACTERS:
            raise TooMuchWork(f"it has {len(source):,} characters")
        tree = self.parse(source)
        for literal in tree.find_all(nodes.TemplateData):
            literal.data = change_literal(literal.data)
        for constant in tree.find_all(nodes.Const):
            if isinstance(constant.value, str):
                constant.value = change_literal(constant.value)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _call("counted", [cast(nodes.Expr, loop.iter)])
        return self.from_string(_Concats().visit(tree))

    def render(self, template: Any, variables: Mapping[str, Any]) -> str:
        """The text of a template of this environment."""
        with self.rendering:
            self._num_steps, self._start = 0, time.thread_time()
            return "".join(self._pieces(template.generate(**variables)))

    def _pieces(self, pieces: Iterator[str]) -> Iterator[str]:
        num_characters = 0
        for piece in pieces:
            num_characters += len(piece)
            _require(num_characters <= MAX_CHARACTERS, f"it wrote more than {MAX_CHARACTERS:,} characters")
            yield piece

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template: counted, and refused if its result could be huge."""
        self._spend(1)
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)  # the sandbox wraps str.format
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name in _GROWING_METHODS:
            _require_small_result(owner, [*args, *kwargs.values()])
        elif isinstance(owner, str) and name in _FORMATS:
            _require_narrow(owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operation of a template, refused if its result could be huge."""
        if operator == "+":
            _require(_extent(left) + _extent(right) <= MAX_CHARACTERS, "it built too long a text")
        elif operator == "%" and isinstance(left, str):
            _require_narrow(left, [right])
        elif operator == "*" and not (_is_number(left) and _is_number(right)):
            _require(_count(left) * _count(right) <= MAX_CHARACTERS, "it built too long a text")
        numbers = [abs(one) for one in (left, right) if isinstance(one, int)]
        limit = _MAX_RANGE if operator == "**" else _MAX_INTEGER
        _require(all(number <= limit for number in numbers), "it computes with too large a number")
        return super().call_binop(context, operator, left, right)

    def counted(self, items: Any) -> Any:
        """What a loop goes over, after counting it."""
        if not hasattr(items, "__len__") and hasattr(items, "__iter__"):
            items = list(items)
        self._spend(1 + (len(items) if hasattr(items, "__len__") else 0))
        return items

    def concatenated(self, *parts: Any) -> str:
        """``a ~ b``."""
        _require(sum(map(_extent, parts)) <= MAX_CHARACTERS, "it built too long a text")
        return "".join(map(str, parts))

    def shown(self, value: Any) -> Any:
        """What is about to be written."""
        _require(_extent(value) <= MAX_CHARACTERS, "it built too long a text")
        return value

    def _spend(self, num_steps: int) -> None:
        self._num_steps += num_steps
        _require(self._num_steps <= MAX_STEPS, f"it loops and calls more than {MAX_STEPS:,} times")
        _require(time.thread_time() - self._start <= MAX_SECONDS, f"it takes more than {MAX_SECONDS:g} seconds")

    def _bounded(self, function: Callable[..., Any], check: Callable[[Any, Sequence[Any]], None]) -> Callable[..., Any]:
        @wraps(function)  # with Jinja's marks for what the function wants to be given first
        def bounded(*args: Any, **kwargs: Any) -> Any:
            own = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self._spend(1)
            check(own[0] if own else "", [*own[1:], *kwargs.values()])
            return function(*args, **kwargs)

        return bounded


class _GenerationBlocks(Extension):
    """``{% generation %}`` says which part is the assistant's; the part is rendered as if nothing was said."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own attribute)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Concats(NodeTransformer):
    """Puts `ChatEnvironment.concatenated` where ``~`` was: Jinja joins without asking the sandbox."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenated", node.nodes)


def _call(method: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)


def _raise_exception(message: Any) -> None:
    raise RefusedByTemplate(str(message))


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Without Jinja's escapes for HTML, as templates for `transformers` expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    _require(len(numbers) <= _MAX_RANGE, f"it loops over a range of more than {_MAX_RANGE:,}")
    return numbers


def _require(kept: bool, otherwise: str) -> None:
    if not kept:
        raise TooMuchWork(otherwise)


def _require_small_result(value: Any, arguments: Sequence[Any]) -> None:
    """By a bound from above for what replacing, joining and padding may give."""
    per_character = 1 + sum(map(_count, arguments))
    _require((1 + _extent(value)) * per_character <= 16 * MAX_CHARACTERS, "it built too long a text")


def _require_narrow(template: Any, values: Sequence[Any]) -> None:
    """The same for formatting ``values`` by ``template``, which has each of them as often as it has characters."""
    _require(_WIDE.search(str(template)) is None, "it pads a text too far")
    size = (1 + _extent(template)) * (1 + sum(map(_extent, values)))
    _require(size <= 16 * MAX_CHARACTERS, "it built too long a text")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _count(value: Any) -> int:
    """How often something may be repeated by ``value``, or how long it is."""
    return abs(value) if isinstance(value, int) else _extent(value)


def _extent(value: Any) -> int:
    """About how long ``value`` is when written, counted no further than the limit."""
    if isinstance(value, str):
        return len(value)
    total, waiting = 0, [value]
    while waiting and total <= MAX_CHARACTERS:
        one = waiting.pop()
        total += len(one) if isinstance(one, str) else _VALUE_CHARACTERS
        if isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one
    return total
