"""User callables by import path: ``"package.module:name"``."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any

from megarl.core.errors import ConfigError


def import_callable(path: str, where: str) -> Callable[..., Any]:
    """Import ``package.module:name``; ``where`` is the config key to blame when that fails."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError("MRL-1301", f'{where}={path!r} is not an import path. Write "package.module:name".')
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way; all are the user's to mend
        raise ConfigError(
            "MRL-1302", f"{where}: cannot import {module_name!r} ({type(error).__name__}: {error}{_place(error)})."
        ) from error
    found: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(found):
        public = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ConfigError(
            "MRL-1303",
            f"{where}: module {module_name!r} has no function {name!r}. It defines: {', '.join(public) or 'none'}.",
        )
    return found


def _place(error: BaseException) -> str:
    """Where in the user's files an import failed, if it got that far."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [frame for frame in frames if frame.filename != __file__]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
