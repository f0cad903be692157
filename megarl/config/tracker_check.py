"""Whether the trackers can work: their options, their packages, their secrets. Nothing of theirs is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config import catalogue
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.schema import RunConfig
from megarl.config.secret_names import is_secret_key
from megarl.config.tracking import TRACKERS, is_keyed, kwargs_of, services_of
from megarl.core.errors import ConfigError
from megarl.core.secret import is_reference, resolve

_TEXT, _TEXTS, _NUMBER, _MAPPING = "text", "a list of texts", "a number above 0", "a mapping"
Rule = str | tuple[str, ...]
# tracker -> its options and what they may be: a kind of value, or one of several words
KWARGS: dict[str, dict[str, Rule]] = {
    "tensorboard": {"log_dir": _TEXT},
    "wandb": {
        "api_key": _TEXT,
        "project": _TEXT,
        "entity": _TEXT,
        "group": _TEXT,
        "name": _TEXT,
        "notes": _TEXT,
        "tags": _TEXTS,
        "log_dir": _TEXT,
        "mode": ("online", "offline"),
        "settings": _MAPPING,
    },
    "swanlab": {
        "login_kwargs": _MAPPING,
        "project": _TEXT,
        "workspace": _TEXT,
        "experiment_name": _TEXT,
        "description": _TEXT,
        "tags": _TEXTS,
        "logdir": _TEXT,
        "mode": ("cloud", "local", "offline"),
    },
    "stdout": {},
    "stdout_json": {},
}
_LOGIN_KWARGS: dict[str, Rule] = {"api_key": _TEXT, "host": _TEXT, "timeout": _NUMBER}
_INSTALL = 'pip install "megarl[trackers]"'


def check_trackers(config: RunConfig) -> list[Problem]:
    """What is wrong with ``track_with`` and ``tracker_kwargs``."""
    return [*_twice(config), *_kwargs(config)]


def require_trackers(config: RunConfig) -> None:
    """Raise a `ConfigError` for the first tracker whose package or whose secret is not there."""
    for tracker in services_of(config.track_with):
        kwargs = kwargs_of(tracker, config.tracker_kwargs)
        _require_package(tracker, tracker)
        if tracker == "swanlab" and kwargs.get("mode") == "local":
            _require_package("swanboard", "swanlab with mode: local", ' (of the extra "swanlab[dashboard]")')
        for reference in secret_references(kwargs):
            resolve(reference)


def secret_references(kwargs: Mapping[str, Any]) -> Iterator[str]:
    """The references of all secrets in the options, at any depth."""
    for key, value in kwargs.items():
        if isinstance(value, Mapping):
            yield from secret_references(value)
        elif is_secret_key(key) and isinstance(value, str) and is_reference(value):
            yield value


def _require_package(package: str, needed_by: str, remark: str = "") -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            "MRL-1015",
            f"track_with: {needed_by} needs the package {package}{remark}, which is not installed.\n{_INSTALL}",
        )


def _twice(config: RunConfig) -> Iterator[Problem]:
    for name in sorted({name for name in config.track_with if config.track_with.count(name) > 1}):
        yield Problem("MRL-1005", f"track_with names {name} twice.", (("track_with",),), ("Keep one.",))


def _kwargs(config: RunConfig) -> Iterator[Problem]:
    path: KeyPath = ("tracker_kwargs",)
    given = config.tracker_kwargs
    services = services_of(config.track_with)
    if is_keyed(given):
        for tracker, kwargs in given.items():
            if isinstance(kwargs, Mapping):
                yield from _options(kwargs, KWARGS[tracker], (*path, tracker), tracker)
            elif kwargs is not None:
                text = f"{dotted((*path, tracker))}={show(kwargs)} is not allowed. It must be a mapping."
                yield Problem("MRL-1003", text, ((*path, tracker),))
    elif len(services) == 1 and not any(key in TRACKERS for key in given):
        yield from _options(given, KWARGS[services[0]], path, services[0])
    elif given and services:
        lost = next(key for key in given if key not in TRACKERS)
        example = ", ".join(f"{name}: {{...}}" for name in services)
        text = f"{dotted((*path, lost))} does not say which tracker it is for."
        hint = f"Write tracker_kwargs: {{{example}}}"
        yield Problem("MRL-1005", text, ((*path, lost), ("track_with",)), (hint,))


def _options(given: Mapping[str, Any], known: Mapping[str, Rule], path: KeyPath, owner: str) -> Iterator[Problem]:
    for option, value in given.items():
        place = (*path, option)
        if option not in known:
            close = catalogue.closest(option, known)
            meant = f" Did you mean {close}?" if close else ""
            hint = f"Options of {owner}: {', '.join(known) or 'none'}."
            yield Problem("MRL-1001", f"{dotted(place)} is not an option of {owner}.{meant}", (place,), (hint,))
        elif option == "login_kwargs" and isinstance(value, Mapping):
            yield from _options(value, _LOGIN_KWARGS, place, f"{owner}'s login_kwargs")
        elif value is not None and not _follows(value, known[option]):
            rule = known[option]
            words = rule if isinstance(rule, str) else f"one of {', '.join(rule)}"
            close = catalogue.closest(value, rule) if isinstance(value, str) and isinstance(rule, tuple) else None
            meant = f" Did you mean {close}?" if close else ""
            code = "MRL-1003" if isinstance(rule, str) else "MRL-1004"
            yield Problem(code, f"{dotted(place)}={show(value)} is not allowed. It must be {words}.{meant}", (place,))


def _follows(value: Any, rule: Rule) -> bool:
    if isinstance(rule, tuple):
        return value in rule
    if rule == _TEXTS:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if rule == _NUMBER:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    return isinstance(value, str if rule == _TEXT else Mapping)
