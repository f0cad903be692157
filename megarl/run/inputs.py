"""What a run reads: tokenizer, prompts and reward. Opened before any rank starts, so that mistakes surface at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.algorithms import SftSettings
from megarl.config.layout import max_prompt_tokens, model_shape, reward_shape
from megarl.config.rewards import RewardSettings
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.protocols import SampleScorer
from megarl.core.sample import Prompt
from megarl.data.encoder import PromptEncoder, load_encoder
from megarl.data.jsonl_prompts import PromptField
from megarl.data.prompts import PromptKeys, PromptSource, open_prompts
from megarl.data.same_tokens import require_same_tokens
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards.scorer import Scorer
from megarl.rewards.trial import try_reward
from megarl.rollout.converse import Converse, load_converse
from megarl.rollout.filters import Filters
from megarl.rollout.prompt_stream import require_room

logger = logging.getLogger(__name__)


# Problems of a built-in task are alike: a few tell how long all of them are.
_NUM_MEASURED = 100


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads. Ranks other than the driver have no prompts."""

    tokenizer: Tokenizer
    encoder: PromptEncoder
    scorer: Scorer
    train_prompts: PromptSource | None
    filters: Filters
    # by (eval or bench, name of the set)
    eval_prompts: Mapping[tuple[str, str], Sequence[Prompt]]
    # only of sets that are not scored like training samples
    eval_scorers: Mapping[tuple[str, str], Scorer]
    # of the driver: what leads conversations of several turns
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


def open_inputs(config: RunConfig, *, with_prompts: bool, measure: bool = True, with_training: bool = True) -> Inputs:
    """Open and check all of it; raises a `MegarlError` that names the file and line, or the key, to mend.

    ``measure``: also check every prompt's length, and report skipped rows. Who opens the inputs a second time need not.
    Without ``with_training``, only what an evaluation reads.
    """
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path or "")
    shape = model_shape(config)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            "MRL-1409",
            f"model.tokenizer={tokenizer.name!r} has {tokenizer.vocab_size} tokens, but the model's vocab_size is "
            f"{shape.vocab_size}. Use the tokenizer that belongs to the model.",
        )
    encoder = load_encoder(config.chat, tokenizer)
    if config.uses_reward_model:
        directory = Path(config.reward_model.path or "")
        same_size = reward_shape(config).vocab_size == shape.vocab_size
        require_same_tokens(tokenizer, directory, "reward_model.path", same_size=same_size)
    logs = Path(config.run.dir) / config.run.name / "logs"
    scorer = Scorer(config.reward, config.scoring, logs)
    eval_scorers: dict[tuple[str, str], Scorer] = {
        (kind, name): Scorer(own.reward, config.scoring, logs)
        for kind, name, own in config.eval_sets
        if own.reward is not None
    }
    if not with_prompts:
        return Inputs(tokenizer, encoder, scorer, None, Filters(), {}, eval_scorers)
    filters = Filters(config.rollout.filters if config.rollout and with_training else ())
    train = _open_train(config, tokenizer, measure=measure) if with_training else None
    evals = _open_evals(config, tokenizer)
    return Inputs(tokenizer, encoder, scorer, train, filters, evals, eval_scorers, _load_converse(config))


def try_rewards(config: RunConfig, inputs: Inputs) -> list[str]:
    """Call every reward once, in a worker; raises a `MegarlError` if one does not work, else says what they gave."""
    train = inputs.train_prompts
    row = train[0] if train is not None and len(train) else None
    lines = [try_reward(reward, config.scoring, row) for reward in config.reward]
    for kind, name, own in config.eval_sets:
        rows = inputs.eval_prompts.get((kind, name), [])
        for reward in own.reward or []:
            if reward not in config.reward:
                lines.append(try_reward(reward, config.scoring, rows[0] if rows else None))
    return lines


def _load_converse(config: RunConfig) -> Converse | None:
    if config.rollout is None or config.rollout.converse is None:
        return None
    return load_converse(config.rollout.converse.name, config.rollout.converse.options)


def _keys(config: RunConfig) -> PromptKeys:
    return PromptKeys(config.data.prompt_key, config.data.answer_key, config.data.demonstration_key)


def _needs_answer(rewards: Sequence[RewardSettings]) -> set[PromptField]:
    return {"answer"} if any(reward.name == "exact_match" for reward in rewards) else set()


def _open_train(config: RunConfig, tokenizer: Tokenizer, *, measure: bool) -> PromptSource:
    supervised = isinstance(config.algorithm, SftSettings)
    required: set[PromptField] = set() if supervised else _needs_answer(config.reward)
    if supervised or config.warmup:
        required.add("demonstration")
    source = open_prompts(
        config.data.train,
        tokenizer,
        _keys(config),
        bad_rows=config.data.bad_rows,
        max_bad_rows=config.data.max_bad_rows,
        required=frozenset(required),
    )
    if measure:
        if source.skip_report:
            logger.warning("%s", source.skip_report)
        built_in = config.data.train.startswith("builtin:")
        for i in range(min(len(source), _NUM_MEASURED) if built_in else len(source)):
            require_room(source[i], max_prompt_tokens(config))
    return source


def _open_evals(config: RunConfig, tokenizer: Tokenizer) -> dict[tuple[str, str], list[Prompt]]:
    evals: dict[tuple[str, str], list[Prompt]] = {}
    for kind, name, settings in config.eval_sets:
        where = f"eval.{'sets' if kind == 'eval' else 'bench_sets'}.{name}.data"
        required = frozenset(_needs_answer(settings.reward or config.reward))
        source = open_prompts(
            settings.data,
            tokenizer,
            _keys(config),
            bad_rows=config.data.bad_rows,
            max_bad_rows=config.data.max_bad_rows,
            required=required,
            where=where,
        )
        evals[kind, name] = [source[i] for i in range(min(len(source), settings.max_prompts))]
        for prompt in evals[kind, name]:
            require_room(prompt, max_prompt_tokens(config, settings.max_new_tokens))
    return evals
