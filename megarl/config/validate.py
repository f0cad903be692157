"""From settings as written to a `RunConfig`: the schema's findings in our own words."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from megarl.config import catalogue
from megarl.config.algorithms import kind_of_algorithm
from megarl.config.names import ALGORITHMS
from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.schema import RunConfig
from megarl.config.tree import Node, descend, plain, without

# of what is neither a setting nor always a mapping
_RULES = {"reward": "a name, a mapping, or a list of these"}
_WRONG_TYPE = ("_type", "_parsing", "int_from_float")


def validate(root: Node) -> tuple[RunConfig | None, list[Problem]]:
    """The configuration and no problems; or the problems and, if the rest of it stands alone, what is left of it.

    What is left lacks every setting that a problem is about, so it only serves to look for further problems.
    """
    tree = plain(root)
    try:
        return RunConfig.model_validate(tree), []
    except ValidationError as error:
        found = error.errors(include_url=False)
    algorithm = kind_of_algorithm(tree.get("algorithm"))
    problems = [_Finding(dict(entry), root, algorithm).problem() for entry in found]
    for problem in problems:
        root = without(root, problem.keys[0])
    try:
        rest = RunConfig.model_validate(plain(root))
    except ValidationError:
        rest = None
    return rest, sorted(problems, key=lambda problem: problem.code)


class _Finding:
    """One finding of pydantic's, and what is needed to put it into words."""

    def __init__(self, entry: dict[str, Any], root: Node, algorithm: str | None) -> None:
        self._kind: str = entry["type"]
        self._context: dict[str, Any] = entry.get("ctx", {})
        self._input = entry["input"]
        self._algorithm = algorithm
        self._root = root
        self._path = _as_written(_key_path(entry["loc"]), root)

    def problem(self) -> Problem:
        if self._kind == "extra_forbidden":
            return self._unknown_key()
        if self._kind == "missing":
            return self._missing()
        if self._kind.startswith("union_tag"):
            return self._algorithm_without_name()
        if self._path[-1] == "[key]":
            return self._unusable_name()
        return self._wrong_value()

    def _unknown_key(self) -> Problem:
        section = self._path[:-1]
        listed = self._list_around(section)
        if listed is not None:
            hint = f"{dotted(listed.path)} is {listed.rule}."
            return Problem("MRL-1001", f"{dotted(self._path)} is not a setting.", (listed.path,), (hint,))
        text = f"{dotted(self._path)} is not a setting"
        owners = [s.algorithms[0] for s in catalogue.settings() if s.path == self._path]
        suggestion = None if owners else catalogue.suggest_key(self._path, self._algorithm)
        if owners:
            owner = "algorithms by import path" if owners == ["custom"] else " and ".join(owners)
            text += f" of {self._algorithm}; it belongs to {owner}"
        text += f". Did you mean {dotted(suggestion)}?" if suggestion else "."
        keys = ", ".join(catalogue.keys_of(section, self._algorithm))
        hint = f"Settings of {dotted(section)}: {keys}." if section else f"Sections: {keys}."
        return Problem("MRL-1001", text, (self._path,), (hint,))

    def _list_around(self, path: KeyPath) -> catalogue.Setting | None:
        """The setting that is the list in which ``path`` is an item, if it is one."""
        _, owner = descend(self._root, path)
        return catalogue.find(owner, self._algorithm) if owner != path else None

    def _missing(self) -> Problem:
        found = catalogue.find(self._path, self._algorithm) or self._list_around(self._path[:-1])
        if found is not None:
            hint = f"{found.description} Give {found.rule}."
        else:
            required = ", ".join(catalogue.required_in(self._path))
            hint = f"It needs at least: {required}." if required else f"Write {dotted(self._path)}: {{...}}"
        return Problem("MRL-1002", f"{dotted(self._path)} is required but not given.", (self._path,), (hint,))

    def _algorithm_without_name(self) -> Problem:
        choices = f'Choose {", ".join(ALGORITHMS)}, or "package.module:Class".'
        if not isinstance(self._input, dict):
            name = self._input if isinstance(self._input, str) else "grpo"
            hint = f"Write algorithm: {{name: {show(name)}}}. {choices}"
            return Problem("MRL-1003", f"algorithm={show(self._input)} must be a mapping.", (self._path,), (hint,))
        path = (*self._path, "name")
        if "name" not in self._input:
            return Problem("MRL-1002", "algorithm.name is required but not given.", (path,), (choices,))
        name = self._input["name"]
        return Problem(
            "MRL-1004", f"algorithm.name={show(name)} is not known.{_meant(name, ALGORITHMS)}", (path,), (choices,)
        )

    def _unusable_name(self) -> Problem:
        if self._path[:2] == ("metrics", "view_per_sink"):
            sinks = ("console", "tensorboard", "wandb", "swanlab", "stdout_json")
            text = f"metrics.view_per_sink has no {show(self._path[-2])}.{_meant(self._path[-2], sinks)}"
            return Problem("MRL-1004", text, (self._path[:-1],), (f"Its keys are {', '.join(sinks)}.",))
        text = f"{show(self._path[-2])} cannot be the name of a set in {dotted(self._path[:-2])}."
        hint = "Use letters, digits, dots, dashes and underscores; slashes inside, as in openai/gsm8k."
        return Problem("MRL-1004", text, (self._path[:-1],), (hint,))

    def _wrong_value(self) -> Problem:
        # A value in the short form (reward: NAME) stands for the key inside it: name what the user wrote.
        _, path = descend(self._root, self._path)
        path = path or self._path
        # what is wrong with an item of a list is told by the rule of the list
        while path[-1].isdecimal() and catalogue.find(path[:-1], self._algorithm):
            path = path[:-1]
        found = catalogue.find(self._path, self._algorithm) or catalogue.find(path, self._algorithm)
        rule = found.rule if found else _RULES.get(path[-1], "a mapping")
        choices = self._context.get("choices") or (found.choices if found else ())
        code = "MRL-1003" if self._kind.endswith(_WRONG_TYPE) else "MRL-1004"
        text = f"{dotted(path)}={show(self._input)} is not allowed. It must be {rule}.{_meant(self._input, choices)}"
        return Problem(code, text, (path,), self._rewrite(rule))

    def _rewrite(self, rule: str) -> tuple[str, ...]:
        """What to write instead, where the mistake is a well-known one."""
        value, last = self._input, self._path[-1]
        if (
            self._kind == "bool_type"
            and isinstance(value, str)
            and value.lower() in ("yes", "on", "y", "no", "off", "n")
        ):
            return (f"Write {last}: {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}",)
        if self._kind == "int_type" and isinstance(value, float) and value.is_integer():
            return (f"Write {last}: {int(value)}",)
        if self._kind == "string_type" and isinstance(value, (int, float)):
            return (f"Put it in quotes: {last}: '{show(value)}'",)
        if self._kind == "model_type" and value is None:
            return (f"{last}: has nothing under it. Indent its settings, or remove the line.",)
        return (f"Remove the quotes: {last}: {value}",) if "number" in rule and _is_quoted_number(value) else ()


def _key_path(location: tuple[int | str, ...]) -> KeyPath:
    """The path in the file: pydantic puts the union's tag behind ``algorithm``."""
    path = tuple(str(part) for part in location)
    return (path[0], *path[2:]) if path[0] == "algorithm" and len(path) > 1 else path


def _as_written(path: KeyPath, root: Node) -> KeyPath:
    """A single reward is read as a list of one; where the user wrote no list, there is no number in the path."""
    for i, key in enumerate(path):
        if i and path[i - 1] == "reward" and key == "0":
            node, reached = descend(root, path[:i])
            if reached == path[:i] and not isinstance(node.value, list):
                return (*path[:i], *path[i + 1 :])
    return path


def _meant(value: Any, choices: Any) -> str:
    close = catalogue.closest(value, choices) if isinstance(value, str) else None
    return f" Did you mean {close}?" if close else ""


def _is_quoted_number(value: Any) -> bool:
    if not isinstance(value, str) or len(value) > 30 or not value.isascii():
        return False
    try:
        float(value)
    except ValueError:
        return False
    return True
