"""The prompts of a run: opened, checked, and named by what is in them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from megarl.config.data import DataSettings, SourceSettings
from megarl.config.schema import RunConfig
from megarl.core.errors import DataError
from megarl.core.sample import Prompt
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import BadRowPolicy, PromptField, PromptKeys, PromptSource, open_prompts
from megarl.rollout.prompt_stream import refuse, why_no_room

logger = logging.getLogger(__name__)

Required = frozenset[PromptField]


def open_training(config: RunConfig, encoder: PromptEncoder, required: Required) -> list[PromptSource]:
    """One source for each entry of data.train. How long their prompts are is seen when they are drawn."""
    data = config.data
    return [
        open_prompts(
            one.path,
            encoder,
            _keys(data, one),
            policy=_policy(data),
            required=required,
            where="data.train" if len(data.train) == 1 else f"data.train.{number}.path",
        )
        for number, one in enumerate(data.train)
    ]


def open_evaluation(
    config: RunConfig, encoder: PromptEncoder, path: str, required: Required, where: str
) -> PromptSource:
    """The prompts of one set; ``where`` is its key."""
    keys = _keys(config.data, None)
    return open_prompts(path, encoder, keys, policy=_policy(config.data), required=required, where=where)


def first_that_fit(
    config: RunConfig, source: PromptSource, max_prompts: int, max_prompt_tokens: int, where: str, *, speak: bool
) -> list[Prompt]:
    """The first prompts of a set to evaluate, without those that are too long. ``speak``: say how many these are."""
    first = [source[i] for i in range(min(len(source), max_prompts))]
    problems = [why_no_room(prompt, max_prompt_tokens) for prompt in first]
    fitting = [prompt for prompt, problem in zip(first, problems, strict=True) if problem is None]
    found = [problem for problem in problems if problem is not None]
    if found and config.data.too_long == "error":
        raise refuse(found[0])
    if not fitting:
        raise DataError("MRL-2014", f"{where}: not one of {len(first):,} prompts is short enough. {found[0]}")
    if found and speak:
        logger.warning("%s: %d of %d prompts are left out, too long: %s", where, len(found), len(first), found[0])
    return fitting


def hashes_of(config: RunConfig, sources: Sequence[PromptSource]) -> dict[str, str]:
    """Of the training data's files, by path."""
    pairs = zip(config.data.train, sources, strict=True)
    return {own.path: source.content_hash for own, source in pairs if source.content_hash is not None}


def write_description(path: Path, sources: Mapping[str, tuple[str, PromptSource]]) -> None:
    """What the run read, for whoever wants to repeat it: by key, each file, its hash and its number of rows."""
    tree = {
        key: {
            "path": name,
            "sha256": source.content_hash,
            "num_rows": len(source),
            "num_bad_rows": source.num_skipped_rows,
        }
        for key, (name, source) in sources.items()
    }
    path.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")


def _policy(data: DataSettings) -> BadRowPolicy:
    return BadRowPolicy(data.bad_rows, data.max_bad_rows)


def _keys(data: DataSettings, own: SourceSettings | None) -> PromptKeys:
    """A source's own names, where it has some."""
    return PromptKeys(
        (own and own.prompt_key) or data.prompt_key,
        (own and own.answer_key) or data.answer_key,
        (own and own.demonstration_key) or data.demonstration_key,
        (own and own.answer_after) or data.answer_after,
    )
