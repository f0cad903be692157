"""Foreign text for a terminal: nothing in it can move the cursor, change colours or turn the writing around."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

_TAB = " " * 4


def visible(text: str) -> str:
    """On one line or several, with everything unprintable named: an escape character becomes ``⟨U+001B⟩``.

    Line feeds stay; whoever prints the text puts something of their own in front of each line.
    """
    text = text.replace("\r\n", "\n").replace("\t", _TAB)
    return "".join(char if char == "\n" or char.isprintable() else f"⟨U+{ord(char):04X}⟩" for char in text)


def num_cells(text: str) -> int:
    """Columns that a terminal takes for printable text: two for wide characters, none for marks on the one before."""
    return sum(map(_width, text))


def wrap(text: str, width: int) -> Iterator[str]:
    """Lines of at most ``width`` columns, broken at spaces where there are any."""
    for line in visible(text).split("\n"):
        yield from _wrap_line(line, width)


def _wrap_line(line: str, width: int) -> Iterator[str]:
    while True:
        end = _end(line, width)
        if end == len(line):
            yield line
            return
        space = line.rfind(" ", 0, end + 1)
        # a space far to the left would leave most of the line empty
        cut = space if space > end // 2 else end
        yield line[:cut]
        line = line[cut:].removeprefix(" ")


def _end(line: str, width: int) -> int:
    """How many characters of ``line`` fit, one at least. Marks take no room, but four for each column are enough."""
    cells = 0
    for position, char in enumerate(line):
        cells += _width(char)
        if cells > width or position == 4 * width:
            return max(1, position)
    return len(line)


def _width(char: str) -> int:
    if char.isascii():
        return 1
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
