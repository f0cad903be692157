"""Where a user's function went wrong."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from megarl.core.excerpt import excerpt


def describe_failure(error: BaseException, function: Callable[..., Any]) -> str:
    """The exception in one line, with the deepest line of the function's own file if it got that far."""
    frames = list(traceback.extract_tb(error.__traceback__))
    code = getattr(inspect.unwrap(function), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    place = (own or frames)[-1:]
    where = f" ({PurePath(place[0].filename).name}:{place[0].lineno})" if place else ""
    return f"{type(error).__name__}: {excerpt(_text(error))}{where}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's __str__ may fail in any way
        return "an error that cannot be shown"
