"""From a YAML file, its parents and the command line to a checked `RunConfig`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megarl.config.consistency import check_consistency
from megarl.config.document import MAX_BYTES, decode, parse_document
from megarl.config.layout import check_layout, critic_shape, model_shape, reward_shape
from megarl.config.megatron_fields import check_megatron
from megarl.config.model_shape import ModelShape
from megarl.config.problems import COMMAND_LINE, KeyPath, Problem, Source, dotted, raise_problems, show
from megarl.config.schema import RunConfig
from megarl.config.secret_names import is_secret_key
from megarl.config.secrets import check_secrets
from megarl.config.sglang_fields import check_sglang
from megarl.config.tracker_check import check_trackers
from megarl.config.tree import Node, descend, merge, without
from megarl.config.validate import validate
from megarl.core.errors import ConfigError, MissingInputError
from megarl.core.secret import MASK


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration in ``path``, changed by ``overrides`` such as ``actor.optimizer.lr=1e-6``.

    Raises one `ConfigError` that names every problem, or a `MissingInputError` for a file that is not there.
    """
    problems: list[Problem] = []
    root = _read_chain(Path(path), (), problems)
    for override in overrides:
        root = merge(root, _read_override(override, problems))
    written = root
    secrets, places = check_secrets(root)
    for place in places:  # from here on nothing can show them
        root = without(root, place)
    config, found = validate(root)
    found = secrets + [problem for problem in found if not _concern_same_keys(problem, secrets)]
    problems += found
    missing = None
    if config is not None:
        further, missing = _check_whole(config)
        problems += [problem for problem in further if not _concern_same_keys(problem, found)]
    if problems:
        raise_problems([_located(problem, written) for problem in problems])
    if missing is not None:
        raise missing
    assert config is not None  # no problems: the schema accepted it
    return config


def _check_whole(config: RunConfig) -> tuple[list[Problem], MissingInputError | None]:
    """What only the whole configuration can show."""
    problems = [*check_consistency(config), *check_megatron(config), *check_sglang(config), *check_trackers(config)]
    missing = None
    shapes: list[tuple[Callable[[RunConfig], ModelShape], tuple[KeyPath, ...]]] = []
    if config.model.path is not None or config.model.config is not None:
        shapes.append((model_shape, (("model", "config"), ("model", "path"))))
    if config.uses_critic and config.critic.path is not None:
        shapes.append((critic_shape, (("critic", "path"),)))
    if config.uses_reward_model and config.reward_model.path is not None:
        shapes.append((reward_shape, (("reward_model", "path"),)))
    for read, keys in shapes:
        try:
            read(config)
        except ConfigError as error:
            problems.append(Problem(error.code, str(error).removeprefix(f"{error.code} "), keys))
        except MissingInputError as error:
            missing = missing or error
    return problems + check_layout(config), missing


def _read_chain(path: Path, children: tuple[Path, ...], problems: list[Problem]) -> Node:
    """The file merged over the parent that it extends, and that over its own, and so on."""
    file = os.path.normpath(path)
    document = parse_document(decode(_read_bytes(path, bool(children)), file), file, problems)
    if document is None:
        raise_problems([*problems, Problem("MRL-1006", "is empty: there are no settings in it.", where=file)])
    if not isinstance(document.value, dict):
        text = f"must hold settings (key: value), not {_kind(document)}."
        raise_problems([*problems, Problem("MRL-1006", text, where=str(document.source))])
    settings = dict(document.value)
    extends = settings.pop("extends", None)
    root = Node(settings, document.source)
    if extends is None:
        return root
    if not isinstance(extends.value, str) or not extends.value:
        text = "extends must be the path of one file, relative to this one."
        raise_problems([*problems, Problem("MRL-1009", text, where=str(extends.source))])
    parent = path.parent / extends.value
    seen = (*children, path)
    if os.path.realpath(parent) in {os.path.realpath(child) for child in seen}:
        circle = " -> ".join(os.path.normpath(one) for one in (*seen, parent))
        text = f"extends goes in a circle: {circle}."
        raise_problems([*problems, Problem("MRL-1009", text, where=str(extends.source))])
    return merge(_read_chain(parent, seen, problems), root)


def _kind(node: Node) -> str:
    return "a list" if isinstance(node.value, list) else show(node.value)


def _read_bytes(path: Path, is_parent: bool) -> bytes:
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)  # one more than allowed, so that the reader can tell
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL in it
        reason = error.strerror if isinstance(error, OSError) else str(error)
        code, what = ("MRL-4011", "the extended file") if is_parent else ("MRL-4010", "the configuration")
        raise MissingInputError(code, f"{what} {show(os.path.normpath(path))} cannot be read: {reason}.") from error


def _read_override(override: str, problems: list[Problem]) -> Node:
    """``a.b=1`` as the one-line document that it stands for: ``a: {b: 1}``. An empty mapping if it is malformed."""
    key, equals, text = override.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        names_secret = any(is_secret_key(word) for word in re.split(r"[^\w-]+", override))
        shown = "a word with the name of a secret in it" if names_secret else show(override)
        problem = f"{shown} is not of the form key=value."
        hint = "Write for example actor.optimizer.lr=1e-6"
        problems.append(Problem("MRL-1010", problem, hints=(hint,), where=str(COMMAND_LINE)))
        return Node({}, COMMAND_LINE)
    try:
        node = parse_document(text, COMMAND_LINE.file, problems) or Node(None, COMMAND_LINE)
    except ConfigError:
        shown = MASK if any(is_secret_key(part) for part in path) else show(text)
        problem = f"{dotted(path)}={shown} has a value that is not YAML."
        hint = "Quote text with special characters, twice because of the shell: reward.options.after='\":\"'"
        problems.append(Problem("MRL-1010", problem, (path,), (hint,), str(COMMAND_LINE)))
        return Node({}, COMMAND_LINE)
    for name in reversed(path):
        node = Node({name: node}, COMMAND_LINE)
    return node


def _concern_same_keys(problem: Problem, others: Sequence[Problem]) -> bool:
    """Whether a problem may only be a consequence: it involves a setting that is already complained about."""
    return any(
        mine[: len(theirs)] == theirs or theirs[: len(mine)] == mine
        for other in others
        for theirs in other.keys
        for mine in problem.keys
    )


def _located(problem: Problem, root: Node) -> Problem:
    if problem.where:
        return problem
    reached = [(descend(root, path), path) for path in problem.keys]
    written = [node for (node, depth), path in reached if depth == path]
    source: Source = written[0].source if written else reached[0][0][0].source
    return replace(problem, where=str(source))
