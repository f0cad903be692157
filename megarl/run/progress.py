"""How far a run is: what a checkpoint holds beside tensors, as plain data that is readable without any rank."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config.schema import RunConfig
from megarl.config.tokenizer_files import template_of
from megarl.core.errors import DataError
from megarl.data.content import content_hash


class Best(NamedTuple):
    """The step with the best value of ``checkpoint.best_metric`` among those that were saved."""

    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A run after ``step`` complete steps."""

    step: int
    # the weights that the engines serve; None if they never got any
    served_version: int | None
    # where each stage is in the training data
    cursors: dict[str, dict[str, Any]]
    # what each model has beside tensors
    models: dict[str, dict[str, Any]]
    num_samples: float
    num_tokens: float
    # how long the ledger was when the step's line was in it
    ledger_bytes: int
    best: Best | None
    # torch's name of the type that the policy computes in; its main weights are always float32
    dtype: str
    config: dict[str, Any]
    config_digest: str
    # of the chat template's text; None if prompts are plain text
    template_digest: str | None
    # of the training data's files, by path
    data_hashes: dict[str, str]

    def to_tree(self) -> dict[str, Any]:
        """JSON values only."""
        return asdict(self)

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Progress:
        """The inverse of `to_tree`."""
        names = {field.name for field in fields(cls)}
        if tree.keys() != names:
            differing = ", ".join(sorted(tree.keys() ^ names))
            raise DataError(
                "MRL-2501",
                f"the checkpoint was written by another version of megarl: it differs in {differing}.\n"
                "Resume with that version, or start over with --fresh.",
            )
        return cls(**{**tree, "best": Best(*tree["best"]) if tree["best"] else None})


def last_step_of(config: RunConfig) -> int:
    """The number of the run's last step."""
    return config.run.num_steps + (config.warmup.num_steps if config.warmup else 0)


def config_digest(tree: dict[str, Any]) -> str:
    """One number for a whole configuration."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def template_digest(config: RunConfig) -> str | None:
    """SHA-256 of the chat template; None if prompts are plain text."""
    template = template_of(config)
    return template.sha256 if template is not None else None


def data_hashes(config: RunConfig) -> dict[str, str]:
    """SHA-256 of the training data's files, by path. Built-in tasks have no file."""
    paths = dict.fromkeys(source.path for source in config.data.train)
    return {path: content_hash(Path(path)) for path in paths if not path.startswith("builtin:")}
