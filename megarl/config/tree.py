"""Settings as they were written: plain values that remember the line they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megarl.config.problems import KeyPath, Source

Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Node:
    """A value of a YAML document. ``source`` is the line of the value's key, or of the value where there is no key."""

    value: Scalar | list[Node] | dict[str, Node]
    source: Source


def plain(node: Node) -> Any:
    """The value without sources."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def merge(parent: Node, child: Node) -> Node:
    """Mappings key by key, the child wins; anything else, lists too, is replaced as a whole."""
    if not (isinstance(parent.value, dict) and isinstance(child.value, dict)):
        return child
    merged = dict(parent.value)
    for key, node in child.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    # A section that the command line only adds to is still to be found in the file.
    return Node(merged, child.source if child.source.line else parent.source)


def without(node: Node, path: KeyPath) -> Node:
    """The tree minus the setting at ``path``; unchanged if there is none. A list with it is taken away as a whole."""
    key, rest = path[0], path[1:]
    if not isinstance(node.value, dict) or key not in node.value:
        return node
    children = dict(node.value)
    if rest and not isinstance(children[key].value, list):
        children[key] = without(children[key], rest)
    else:
        del children[key]
    return Node(children, node.source)


def descend(node: Node, path: KeyPath) -> tuple[Node, KeyPath]:
    """Walk along ``path`` as far as it exists: the deepest node, and the part of the path that leads to it."""
    for depth, key in enumerate(path):
        if isinstance(node.value, list) and key.isdigit() and int(key) < len(node.value):
            node = node.value[int(key)]
        elif isinstance(node.value, dict) and key in node.value:
            node = node.value[key]
        else:
            return node, path[:depth]
    return node, path
