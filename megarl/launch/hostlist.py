"""Slurm's short spellings: ``node[01-03,7],login`` for host names, ``2(x3),1`` for how many tasks each node has."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megarl.core.errors import ConfigError

# A range that is longer than any cluster is a mistake, and would fill the memory.
_MAX_HOSTS = 1_000_000
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(expression: str) -> list[str]:
    """All host names of a host list, in its order."""
    hosts = [host for part in _split(expression) for host in _expand(part, expression)]
    if not hosts:
        raise _unreadable(expression)
    return hosts


def expand_tasks(expression: str) -> list[int]:
    """How many tasks each node has, in the order of the nodes."""
    counts: list[int] = []
    for part in expression.split(","):
        found = _TASKS.fullmatch(part)
        if found is None or len(counts) + int(found[2] or 1) > _MAX_HOSTS:
            raise _unreadable(expression)
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(expression: str) -> Iterator[str]:
    """The parts between commas that are not in brackets."""
    depth, part = 0, ""
    for character in expression:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _unreadable(expression)
        if character == "," and depth == 0:
            yield part
            part = ""
        else:
            part += character
    if depth:
        raise _unreadable(expression)
    yield part


def _expand(part: str, expression: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        if not part:
            raise _unreadable(expression)
        return [part]
    ranges, _, after = rest.partition("]")
    tails = _expand(after, expression) if after else [""]
    numbers = [number for one in ranges.split(",") for number in _numbers(one, expression)]
    if len(numbers) * len(tails) > _MAX_HOSTS:
        raise _unreadable(expression)
    return [f"{before}{number}{tail}" for number in numbers for tail in tails]


def _numbers(text: str, expression: str) -> list[str]:
    """``08-11`` keeps its width: 08, 09, 10, 11."""
    found = _RANGE.fullmatch(text)
    if found is None:
        raise _unreadable(expression)
    first, last = int(found[1]), int(found[2] or found[1])
    if not 0 <= last - first < _MAX_HOSTS:
        raise _unreadable(expression)
    return [str(number).zfill(len(found[1])) for number in range(first, last + 1)]


def _unreadable(expression: str) -> ConfigError:
    return ConfigError(
        "MRL-1604",
        f"Slurm's list {expression[:80]!r} cannot be read.\n"
        "A list looks like node[01-04],login or 2(x3),1. Set MASTER_ADDR to the first node's address to do without.",
    )
