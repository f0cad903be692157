"""Settings that hold a secret hold a reference to it: ``env:NAME`` or ``file:PATH``. Its text is refused, never shown.

A configuration is written down in many places: the run directory, every tracker, bug reports. So no text that looks
like a secret gets past the reader, wherever in the file it stands.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.problems import KeyPath, Problem, dotted
from megarl.config.secret_names import is_secret_key
from megarl.config.tree import Node
from megarl.core.secret import has_url_credentials, is_reference


def check_secrets(root: Node) -> tuple[list[Problem], list[KeyPath]]:
    """A problem for every secret that is written out, and the paths to take away before anything else looks at them."""
    found = list(_written_out(root, (), False))
    problems = [problem for problem, _ in found]
    return problems, [path for _, path in found]


def _written_out(node: Node, path: KeyPath, is_secret: bool) -> Iterator[tuple[Problem, KeyPath]]:
    if isinstance(node.value, dict):
        for key, child in node.value.items():
            yield from _written_out(child, (*path, key), is_secret_key(key))
    elif isinstance(node.value, list):
        # a list is taken away as a whole: its items have no path
        for child in node.value:
            yield from ((problem, path) for problem, _ in _written_out(child, path, is_secret))
    elif is_secret and not _may_stay(path[-1], node.value) and not _is_misspelt(path):
        hint = f"Put it into an environment variable or a file, and write {path[-1]}: env:NAME or file:PATH."
        yield Problem("MRL-1013", f"{dotted(path)} is a secret that is written out.", (path,), (hint,)), path
    elif isinstance(node.value, str) and has_url_credentials(node.value):
        text = f"{dotted(path)} is a URL with credentials in it."
        yield Problem("MRL-1013", text, (path,), ("Leave out what stands before the @.",)), path


def _is_misspelt(path: KeyPath) -> bool:
    """``data.prmpt_key`` is a typo, not a secret: that section has no room for one, and the schema refuses the word."""
    return path[0] == "data" and path[-1].endswith("_key")


def _may_stay(key: str, value: object) -> bool:
    """References, and what is no secret: nothing, a switch, a number of tokens."""
    if isinstance(value, str):
        return not value or is_reference(value)
    return value is None or isinstance(value, bool) or "token" in key.lower()
