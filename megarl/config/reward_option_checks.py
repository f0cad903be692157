"""What is wrong with the options of a built-in reward, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megarl.config import catalogue
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.reward_options import REWARD_OPTIONS

_WRONG_TYPE = ("_type", "_parsing", "int_from_float")


def check_options(name: str, options: Mapping[str, Any], paths: Sequence[KeyPath]) -> Iterator[Problem]:
    """The problems of a reward's options. A user's own function is checked when it is imported instead.

    ``paths`` are where the reward may stand in the file; the last one is shown.
    """
    if name not in REWARD_OPTIONS:
        return
    try:
        REWARD_OPTIONS[name].model_validate(dict(options))
    except ValidationError as error:
        for entry in error.errors(include_url=False):
            yield _problem(name, dict(entry), paths)


def _problem(name: str, entry: dict[str, Any], paths: Sequence[KeyPath]) -> Problem:
    known = catalogue.settings_of(REWARD_OPTIONS[name])
    all_options = f"Options of {name}: {', '.join(known) or 'none'}."
    whole = (*((*path, "options") for path in paths), *((*path, "name") for path in paths), *paths)
    shown = (*paths[-1], "options")
    if not entry["loc"]:  # about several options together
        text = f"{dotted(shown)} does not fit {name}: {entry['msg']}."
        return Problem("MRL-1005", text, whole, (all_options,))
    option = str(entry["loc"][0])
    keys = tuple((*path, "options", option) for path in paths)
    where = dotted((*shown, option))
    if entry["type"] == "extra_forbidden":
        close = catalogue.closest(option, known)
        meant = f" Did you mean {dotted((*shown, close))}?" if close else ""
        text = f"{where} is not an option of {name}.{meant}"
        return Problem("MRL-1001", text, (*keys, *((*path, "name") for path in paths)), (all_options,))
    found = known[option]
    if entry["type"] == "missing":
        hint = f"{found.description} Give {found.rule}."
        return Problem("MRL-1002", f"{where} is required by {name} but not given.", whole, (hint,))
    why = f" ({entry['msg']})" if entry["type"] == "rule" else ""
    text = f"{where}={show(entry['input'])} is not allowed{why}. It must be {found.rule}."
    return Problem("MRL-1003" if entry["type"].endswith(_WRONG_TYPE) else "MRL-1004", text, keys)
