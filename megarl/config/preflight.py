"""Whether the files that a run will open are there. Cheap enough to do before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megarl.config.problems import KeyPath, dotted, show
from megarl.config.schema import RunConfig
from megarl.config.tokenizer_files import template_of
from megarl.core.errors import MissingInputError


def require_inputs(config: RunConfig, *, trains: bool = True) -> None:
    """Raise one `MissingInputError` that names everything missing. Relative paths start at the working directory.

    ``trains``: also what only training reads. A chat template that cannot be read, or settings for one that is not
    there, are a `ConfigError`.
    """
    missing = [*_weights(config), *_tokenizer(config), *_data(config, trains=trains)]
    if missing:
        code = missing[0].partition(" ")[0]
        raise MissingInputError(code, "\n".join(missing).removeprefix(f"{code} "))
    template_of(config)


def _weights(config: RunConfig) -> Iterator[str]:
    directories = {
        "model.path": config.model.path,
        "critic.path": config.critic.path if config.uses_critic else None,
        "reward_model.path": config.reward_model.path if config.uses_reward_model else None,
    }
    names = ("model.safetensors", "model.safetensors.index.json")
    for key, directory in directories.items():
        if directory is not None and not any(_is_file(Path(directory) / name) for name in names):
            yield f"MRL-4002 {key}={show(directory)}: there is no {names[0]} and no {names[1]} in it."


def _tokenizer(config: RunConfig) -> Iterator[str]:
    key = "model.path" if config.model.tokenizer is None else "model.tokenizer"
    directory = config.model.tokenizer or config.model.path or ""
    if not directory.startswith("builtin:") and not _is_file(Path(directory) / "tokenizer.json"):
        yield f"MRL-4101 {key}={show(directory)}: there is no tokenizer.json in it."


def _data(config: RunConfig, *, trains: bool) -> Iterator[str]:
    train = config.data.train if trains else []
    keys: list[KeyPath] = [("data", "train", str(number), "path") for number in range(len(train))]
    sources = {key if len(train) > 1 else ("data", "train"): one.path for key, one in zip(keys, train, strict=True)}
    sections = {"eval": "sets", "bench": "bench_sets"}
    sources |= {("eval", sections[kind], name, "data"): one.data for kind, name, one in config.eval_sets}
    for path, source in sources.items():
        if not source.startswith("builtin:") and not _is_file(Path(source)):
            yield f"MRL-4102 {dotted(path)}={show(source)}: there is no such file."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long a name, or a NUL in it
        return False
