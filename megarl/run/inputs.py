"""What a run reads: tokenizer, prompts and rewards. Opened before any rank starts, so that mistakes surface at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.algorithms import SftSettings
from megarl.config.layout import max_prompt_tokens, model_shape, reward_shape
from megarl.config.rewards import RewardSettings
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.sample import Prompt
from megarl.data.encoder import PromptEncoder, load_encoder
from megarl.data.prompts import PromptField, PromptSource
from megarl.data.same_tokens import require_same_tokens
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards.scorer import Scorer
from megarl.rewards.trial import try_reward
from megarl.rollout.converse import Converse, load_converse
from megarl.rollout.filters import Filters
from megarl.rollout.trial import try_converse
from megarl.run.datasets import (
    first_that_fit,
    hashes_of,
    open_evaluation,
    open_training,
    require_one_that_fits,
    write_description,
)

if TYPE_CHECKING:  # `megarl check` does without torch
    from megarl.core.protocols import SampleScorer

logger = logging.getLogger(__name__)

# eval or bench, and the name of the set
SetKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads. Ranks other than the driver have no prompts."""

    tokenizer: Tokenizer
    encoder: PromptEncoder
    scorer: Scorer
    # only of sets that are not scored like training samples
    eval_scorers: Mapping[SetKey, Scorer]
    # in the order of data.train
    train_prompts: Sequence[PromptSource] = ()
    # of the training data's files, by path
    train_hashes: Mapping[str, str] = field(default_factory=dict)
    eval_prompts: Mapping[SetKey, Sequence[Prompt]] = field(default_factory=dict)
    filters: Filters = field(default_factory=Filters)
    # what leads conversations of several turns
    converse: Converse | None = None

    def judge_with(self, model: SampleScorer) -> None:
        """Let the reward `model` be this model, wherever it is used."""
        for scorer in (self.scorer, *self.eval_scorers.values()):
            scorer.judge_with(model)

    def start_scorers(self) -> None:
        """Let the workers of all rewards begin. Of the driver, when it is certain that samples will come."""
        for scorer in (self.scorer, *self.eval_scorers.values()):
            scorer.start()

    def close(self) -> None:
        """End the rewards' workers, and what conversations hold open."""
        for scorer in (self.scorer, *self.eval_scorers.values()):
            scorer.close()
        if self.converse is not None:
            self.converse.close()


def open_inputs(
    config: RunConfig,
    *,
    with_prompts: bool,
    with_training: bool = True,
    speak: bool = True,
    describe_in: Path | None = None,
) -> Inputs:
    """Open and check all of it; raises a `MegarlError` that names the file and line, or the key, to mend.

    Without ``with_training``, only what an evaluation reads. ``speak``: say what is left out, and look whether anything
    is left; who opens the inputs a second time need not. ``describe_in``: a directory for ``data.json``, which tells
    what was read.
    """
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path or "")
    _require_same_vocabularies(config, tokenizer)
    encoder = load_encoder(config.chat, tokenizer)
    scorer, eval_scorers = _scorers(config)
    if not with_prompts:
        return Inputs(tokenizer, encoder, scorer, eval_scorers)
    train = _open_train(config, encoder) if with_training else []
    evals = _open_evals(config, encoder)
    if speak:
        for source in (*train, *evals.values()):
            if source.skip_report:
                logger.warning("%s", source.skip_report)
        if with_training:
            require_one_that_fits(config, train, max_prompt_tokens(config))
    if describe_in is not None:
        read = {f"data.train.{number}": (config.data.train[number].path, one) for number, one in enumerate(train)}
        read |= {_key_of(kind, name): (one.data, evals[kind, name]) for kind, name, one in config.eval_sets}
        write_description(describe_in / "data.json", read)
    eval_prompts: dict[SetKey, Sequence[Prompt]] = {}
    for kind, name, own in config.eval_sets:
        room, key = max_prompt_tokens(config, own.max_new_tokens), _key_of(kind, name)
        eval_prompts[kind, name] = first_that_fit(config, evals[kind, name], own.max_prompts, room, key, speak=speak)
    return Inputs(
        tokenizer,
        encoder,
        scorer,
        eval_scorers,
        train,
        hashes_of(config, train) if with_training else {},
        eval_prompts,
        Filters(config.rollout.filters if config.rollout and with_training else ()),
        _load_converse(config),
    )


def try_functions(config: RunConfig, inputs: Inputs) -> list[str]:
    """Call every reward once, and lead one conversation, each in a process of its own.

    Raises a `MegarlError` if one does not work, else says what they gave.
    """
    row = next((source[0] for source in inputs.train_prompts if len(source)), None)
    lines = [try_reward(reward, config.scoring, row) for reward in config.reward]
    for kind, name, own in config.eval_sets:
        rows = inputs.eval_prompts.get((kind, name), [])
        for reward in own.reward or []:
            if reward not in config.reward:
                lines.append(try_reward(reward, config.scoring, rows[0] if rows else None))
    converse = config.rollout.converse if config.rollout else None
    if converse is not None and row is not None:
        lines.append(try_converse(converse.name, converse.options, row, converse.tool_timeout_seconds))
    return lines


def _require_same_vocabularies(config: RunConfig, tokenizer: Tokenizer) -> None:
    """The models of a run read the same token ids."""
    shape = model_shape(config)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            "MRL-1409",
            f"model.tokenizer={tokenizer.name!r} has {tokenizer.vocab_size} tokens, but the model's vocab_size is "
            f"{shape.vocab_size}. Use the tokenizer that belongs to the model.",
        )
    if config.uses_reward_model:
        directory = Path(config.reward_model.path or "")
        same_size = reward_shape(config).vocab_size == shape.vocab_size
        require_same_tokens(tokenizer, directory, "reward_model.path", same_size=same_size)


def _scorers(config: RunConfig) -> tuple[Scorer, dict[SetKey, Scorer]]:
    """That of training samples, and those of sets with rewards of their own. Who is scored alike shares the workers."""
    logs = Path(config.run.dir) / config.run.name / "logs"
    made = [(config.reward, Scorer(config.reward, config.scoring, logs))]
    of_sets: dict[SetKey, Scorer] = {}
    for kind, name, own in config.eval_sets:
        if own.reward is None:
            continue
        scorer = next((scorer for rewards, scorer in made if rewards == own.reward), None)
        if scorer is None:
            scorer = Scorer(own.reward, config.scoring, logs)
            made.append((own.reward, scorer))
        of_sets[kind, name] = scorer
    return made[0][1], of_sets


def _load_converse(config: RunConfig) -> Converse | None:
    if config.rollout is None or config.rollout.converse is None:
        return None
    return load_converse(config.rollout.converse.name, config.rollout.converse.options)


def _needs_answer(rewards: Sequence[RewardSettings]) -> set[PromptField]:
    """A row without an answer is a bad row, found before the start, if a built-in reward compares with it."""
    return {"answer"} if any(reward.name in ("exact_match", "math_answer") for reward in rewards) else set()


def _open_train(config: RunConfig, encoder: PromptEncoder) -> list[PromptSource]:
    supervised = isinstance(config.algorithm, SftSettings)
    required: set[PromptField] = set() if supervised else _needs_answer(config.reward)
    if supervised or config.warmup:
        required.add("demonstration")
    return open_training(config, encoder, frozenset(required))


def _open_evals(config: RunConfig, encoder: PromptEncoder) -> dict[SetKey, PromptSource]:
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
