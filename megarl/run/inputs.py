"""What a run reads: tokenizer, prompts and reward. Opened before any rank starts, so that mistakes surface at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.algorithms import SftSettings
from megarl.config.layout import max_sequence_length, model_shape
from megarl.config.rewards import RewardSettings
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.sample import Prompt
from megarl.data.encoder import PromptEncoder
from megarl.data.prompts import PromptField, PromptSource
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards.load import load_reward
from megarl.rewards.scorer import Scorer
from megarl.run.datasets import (
    first_that_fit,
    hashes_of,
    open_evaluation,
    open_training,
    require_one_that_fits,
    write_description,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads. Ranks other than the driver have no prompts."""

    tokenizer: Tokenizer
    scorer: Scorer
    # in the order of data.train
    train_prompts: Sequence[PromptSource]
    # by (eval or bench, name of the set)
    eval_prompts: Mapping[tuple[str, str], Sequence[Prompt]]
    # only of sets that are not scored like training samples
    eval_scorers: Mapping[tuple[str, str], Scorer]
    # of the training data's files, by path
    train_hashes: Mapping[str, str]

    def close(self) -> None:
        """Give back what rewards hold open."""
        for scorer in (self.scorer, *self.eval_scorers.values()):
            scorer.close()


def open_inputs(
    config: RunConfig, *, with_prompts: bool, speak: bool = True, describe_in: Path | None = None
) -> Inputs:
    """Open and check all of it; raises a `MegarlError` that names the file and line, or the key, to mend.

    ``speak``: say what is left out, and look whether anything is left; who opens the inputs a second time need not.
    ``describe_in``: a directory for ``data.json``, which tells what was read.
    """
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path or "")
    shape = model_shape(config)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            "MRL-1409",
            f"model.tokenizer={tokenizer.name!r} has {tokenizer.vocab_size} tokens, but the model's vocab_size is "
            f"{shape.vocab_size}. Use the tokenizer that belongs to the model.",
        )
    scorer = Scorer(load_reward(config.reward.name, config.reward.options))
    eval_scorers: dict[tuple[str, str], Scorer] = {
        (kind, name): Scorer(load_reward(own.reward.name, own.reward.options))
        for kind, name, own in config.eval_sets
        if own.reward is not None
    }
    if not with_prompts:
        return Inputs(tokenizer, scorer, [], {}, eval_scorers, {})
    encoder = PromptEncoder(tokenizer)
    train, evals = _open_train(config, encoder), _open_evals(config, encoder)
    room = max_prompt_tokens(config)
    if speak:
        for source in (*train, *evals.values()):
            if source.skip_report:
                logger.warning("%s", source.skip_report)
        require_one_that_fits(config, train, room)
    if describe_in is not None:
        own = {f"data.train.{number}": (one.path, train[number]) for number, one in enumerate(config.data.train)}
        own |= {_key_of(kind, name): (one.data, evals[kind, name]) for kind, name, one in config.eval_sets}
        write_description(describe_in / "data.json", own)
    eval_prompts: dict[tuple[str, str], Sequence[Prompt]] = {
        (kind, name): first_that_fit(config, evals[kind, name], one.max_prompts, room, _key_of(kind, name), speak=speak)
        for kind, name, one in config.eval_sets
    }
    return Inputs(tokenizer, scorer, train, eval_prompts, eval_scorers, hashes_of(config, train))


def max_prompt_tokens(config: RunConfig) -> int:
    """The longest prompt that leaves room for its answer."""
    return max_sequence_length(config) - (config.rollout.max_new_tokens if config.rollout else 0)


def _needs_answer(reward: RewardSettings) -> set[PromptField]:
    return {"answer"} if reward.name == "exact_match" else set()


def _open_train(config: RunConfig, encoder: PromptEncoder) -> list[PromptSource]:
    supervised = isinstance(config.algorithm, SftSettings)
    required: set[PromptField] = set() if supervised else _needs_answer(config.reward)
    if supervised or config.warmup:
        required.add("demonstration")
    return open_training(config, encoder, frozenset(required))


def _open_evals(config: RunConfig, encoder: PromptEncoder) -> dict[tuple[str, str], PromptSource]:
    return {
        (kind, name): open_evaluation(
            config,
            encoder,
            settings.data,
            frozenset(_needs_answer(settings.reward or config.reward)),
            _key_of(kind, name),
        )
        for kind, name, settings in config.eval_sets
    }


def _key_of(kind: str, name: str) -> str:
    """The config key of a set's prompts."""
    return f"eval.{'sets' if kind == 'eval' else 'bench_sets'}.{name}.data"
