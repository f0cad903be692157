"""What is wrong with the options of a built-in reward, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from megarl.config import catalogue
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.reward_options import REWARD_OPTIONS

_WRONG_TYPE = ("_type", "_parsing", "int_from_float")


def check_options(name: str, options: Mapping[str, Any], path: KeyPath) -> Iterator[Problem]:
    """The problems of the options at ``path``. A user's own function is checked when it is imported instead."""
    if name not in REWARD_OPTIONS:
        return
    try:
        REWARD_OPTIONS[name].model_validate(dict(options))
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            yield _problem(name, dict(entry), path)


def _problem(name: str, entry: dict[str, Any], path: KeyPath) -> Problem:
    known = catalogue.settings_of(REWARD_OPTIONS[name])
    all_options = f"Options of {name}: {', '.join(known) or 'none'}."
    if not entry["loc"]:  # about several options together
        text = f"{dotted(path)} does not fit {name}: {entry['msg']}."
        return Problem("MRL-1005", text, (path, path[:-1]), (all_options,))
    option = str(entry["loc"][0])
    where = (*path, option)
    if entry["type"] == "extra_forbidden":
        close = catalogue.closest(option, known)
        meant = f" Did you mean {dotted((*path, close))}?" if close else ""
        text = f"{dotted(where)} is not an option of {name}.{meant}"
        return Problem("MRL-1001", text, (where, (*path[:-1], "name")), (all_options,))
    found = known[option]
    if entry["type"] == "missing":
        text = f"{dotted(where)} is required by {name} but not given."
        return Problem("MRL-1002", text, (path, path[:-1]), (f"{found.description} Give {found.rule}.",))
    why = f" ({entry['msg']})" if entry["type"] == "rule" else ""
    text = f"{dotted(where)}={show(entry['input'])} is not allowed{why}. It must be {found.rule}."
    code = "MRL-1003" if entry["type"].endswith(_WRONG_TYPE) else "MRL-1004"
    return Problem(code, text, (where,))
