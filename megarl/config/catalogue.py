"""The schema as a list of settings: for the documentation, for error messages and for suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.algorithms import CustomAlgorithm, GrpoSettings, PpoSettings, SftSettings
from megarl.config.names import ALGORITHMS
from megarl.config.problems import KeyPath, show
from megarl.config.schema import RunConfig

NAME = "NAME"  # stands for a key that the user chooses
NUMBER = "N"  # stands for a place in a list, counted from 0
ANY_ALGORITHM = (*ALGORITHMS, "custom")
_ALGORITHM_OF: dict[type, str] = {
    GrpoSettings: "grpo",
    PpoSettings: "ppo",
    SftSettings: "sft",
    CustomAlgorithm: "custom",
}
_LIMITS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
_WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One leaf of the schema. ``rule`` is what is allowed, in words; ``algorithms`` are those that have it."""

    path: KeyPath
    rule: str
    default: str
    required: bool
    description: str
    elsewhere: tuple[str, ...]
    choices: tuple[str, ...]
    algorithms: tuple[str, ...]


@cache
def settings() -> tuple[Setting, ...]:
    """Every setting in the order of the schema. A setting of several algorithms is listed once per algorithm."""
    return tuple(_walk(RunConfig, (), ANY_ALGORITHM))


def general(path: KeyPath) -> KeyPath:
    """The path with the user's own names and places in lists replaced: ``eval.sets.held_out.data`` ->
    ``eval.sets.NAME.data``, ``data.train.1.weight`` -> ``data.train.N.weight``.
    """
    path = tuple(NUMBER if part.isdecimal() else part for part in path)
    is_set = path[:2] in (("eval", "sets"), ("eval", "bench_sets"))
    if is_set and len(path) > 2:
        # the rewards of a set are like those of training
        path = path[3:] if path[3:4] == ("reward",) and len(path) > 4 else (*path[:2], NAME, *path[3:])
    # one of several rewards has the settings of the only one
    return tuple(key for i, key in enumerate(path) if not (i and path[i - 1] == "reward" and key == NUMBER))


def settings_of(section: type[BaseModel]) -> dict[str, Setting]:
    """The settings of a section that stands outside the schema, by their keys."""
    return {found.path[0]: found for found in _walk(section, (), ANY_ALGORITHM)}


def find(path: KeyPath, algorithm: str | None) -> Setting | None:
    """The setting at ``path``, if it is one."""
    wanted = general(path)
    found = [setting for setting in settings() if setting.path == wanted]
    return next((setting for setting in found if algorithm in setting.algorithms), found[0] if found else None)


def keys_of(path: KeyPath, algorithm: str | None) -> list[str]:
    """The keys that the section at ``path`` may have."""
    wanted = general(path)
    depth = len(wanted)
    inside = (s for s in settings() if s.path[:depth] == wanted and len(s.path) > depth)
    return list(dict.fromkeys(s.path[depth] for s in inside if algorithm is None or algorithm in s.algorithms))


def required_in(path: KeyPath) -> list[str]:
    """The keys of the section at ``path`` that have no default."""
    depth = len(path)
    return [s.path[depth] for s in settings() if s.path[:depth] == path and len(s.path) == depth + 1 and s.required]


def suggest_key(path: KeyPath, algorithm: str | None) -> KeyPath | None:
    """The setting that was probably meant by the unknown ``path``: a close sibling, else the same word elsewhere."""
    section, word = path[:-1], path[-1]
    siblings = keys_of(section, algorithm)
    close = closest(word, siblings)
    if close:
        return (*section, close)
    known = [
        s for s in settings() if not {NAME, NUMBER} & set(s.path) and (algorithm is None or algorithm in s.algorithms)
    ]
    # A word that is spelt right, or that other programs use, counts more than a close one.
    for exact in (True, False):
        matches = [s.path for s in known if _is_meant(word, (s.path[-1], *s.elsewhere), exact)]
        if matches:
            return max(matches, key=lambda match: (_shared(match, path), -len(match)))
    return None


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that is a likely misspelling away, or None: never a wild guess."""
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower()[:100], by_lower, n=1, cutoff=0.75)
    return by_lower[found[0]] if found else None


def _is_meant(word: str, names: tuple[str, ...], exact: bool) -> bool:
    return word in names if exact else closest(word, names) is not None


def _shared(one: KeyPath, other: KeyPath) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _walk(model: type[BaseModel], prefix: KeyPath, algorithms: tuple[str, ...]) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        path = (*prefix, name)
        origin, says = get_origin(field.annotation), _says_what_is_allowed(field)
        inner = [] if says and origin is not list else list(_models_in(field.annotation))
        if not inner or says:
            yield _setting(path, field, algorithms)
        in_container = (NAME,) if origin is dict else (NUMBER,) if origin is list and says else ()
        for kind in inner:
            only = (_ALGORITHM_OF[kind],) if kind in _ALGORITHM_OF else algorithms
            yield from _walk(kind, (*path, *in_container), only)


def _says_what_is_allowed(field: FieldInfo) -> bool:
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("rule")) and get_origin(field.annotation) is not dict


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _setting(path: KeyPath, field: FieldInfo, algorithms: tuple[str, ...]) -> Setting:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    elsewhere = extra.get("elsewhere")
    kinds = list(_alternatives(field.annotation))
    return Setting(
        path=path,
        rule=str(extra.get("rule") or _rule(kinds, field)),
        default="" if field.is_required() else _default(field.default),
        required=field.is_required(),
        description=field.description or "",
        elsewhere=tuple(str(word) for word in elsewhere) if isinstance(elsewhere, list) else (),
        choices=tuple(choice for kind in kinds for choice in _choices(kind)),
        algorithms=algorithms,
    )


def _default(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return f"[{', '.join(value)}]"
    return "{}" if value == {} else show(value)


def _choices(kind: Any) -> tuple[str, ...]:
    """The words to choose from, also where several may be chosen."""
    if get_origin(kind) is list:
        (kind,) = get_args(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for argument in get_args(annotation):
            yield from _alternatives(argument)
    else:
        yield annotation


def _rule(kinds: list[Any], field: FieldInfo) -> str:
    limits = [
        f"{sign} {_number(getattr(constraint, name))}"
        for constraint in field.metadata
        for name, sign in _LIMITS
        if getattr(constraint, name, None) is not None
    ]
    words = " or ".join(_word(kind) for kind in kinds if kind is not NoneType)
    suffix = ", or null" if NoneType in kinds else ""
    return f"{words} {' and '.join(limits)}".rstrip() + suffix


def _number(limit: float) -> str:
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _word(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(get_args(kind)) if len(get_args(kind)) < 3 else "one of " + ", ".join(get_args(kind))
    return _WORDS.get(kind, "a mapping")
