"""What a run reads: tokenizer, prompts and reward. Opened before any rank starts, so that mistakes surface at once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.algorithms import SftSettings
from megarl.config.schema import RunConfig
from megarl.config.layout import model_shape
from megarl.core.errors import ConfigError, DataError
from megarl.core.sample import Prompt
from megarl.data.jsonl_prompts import PromptField
from megarl.data.prompts import PromptKeys, PromptSource, open_prompts
from megarl.data.tokenizer import Tokenizer, load_tokenizer
from megarl.rewards.load import load_reward
from megarl.rewards.reward import RewardFunction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything that a run reads. Ranks other than the driver need the tokenizer and the reward only."""

    tokenizer: Tokenizer
    reward: RewardFunction
    train_prompts: PromptSource
    eval_prompts: Mapping[str, Sequence[Prompt]]


def open_inputs(config: RunConfig) -> Inputs:
    """Open and check all of it; raises a `MegarlError` that names the file and line, or the key, to mend."""
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path or "")
    shape = model_shape(config)
    if tokenizer.vocab_size > shape.vocab_size:
        raise ConfigError(
            "MRL-1409",
            f"model.tokenizer={tokenizer.name!r} has {tokenizer.vocab_size} tokens, but the model's vocab_size is "
            f"{shape.vocab_size}. Use the tokenizer that belongs to the model.",
        )
    reward = load_reward(config.reward.name, config.reward.options)
    keys = PromptKeys(config.data.prompt_key, config.data.answer_key, config.data.demonstration_key)
    supervised = isinstance(config.algorithm, SftSettings)
    scored: set[PromptField] = {"answer"} if config.reward.name == "exact_match" else set()
    required: set[PromptField] = set() if supervised else set(scored)
    if supervised or config.warmup:
        required.add("demonstration")
    train = open_prompts(
        config.data.train,
        tokenizer,
        keys,
        bad_rows=config.data.bad_rows,
        max_bad_rows=config.data.max_bad_rows,
        required=frozenset(required),
    )
    if train.skip_report:
        logger.warning("%s", train.skip_report)
    evals: dict[str, list[Prompt]] = {}
    for name, settings in config.eval.sets.items():
        where = f"eval.sets.{name}.data"
        source = open_prompts(settings.data, tokenizer, keys, required=frozenset(scored), where=where)
        evals[name] = [source[i] for i in range(min(len(source), settings.max_prompts))]
    _check_lengths(config, train, evals, generation_limit(config))
    return Inputs(tokenizer, reward, train, evals)


def generation_limit(config: RunConfig) -> int:
    """Tokens that prompt and response may have together."""
    return model_shape(config).max_positions


def _check_lengths(
    config: RunConfig, train: PromptSource, evals: Mapping[str, Sequence[Prompt]], limit: int
) -> None:
    """A prompt that leaves no room for its answer would stop the run hours later."""
    if config.rollout is None:
        return
    room = limit - config.rollout.max_new_tokens
    suspects = [(config.data.train, train), *((f"eval.sets.{name}", prompts) for name, prompts in evals.items())]
    for where, prompts in suspects:
        for i in range(len(prompts)):
            prompt = prompts[i]
            if len(prompt.token_ids) > room:
                raise DataError(
                    "MRL-2401",
                    f"{where}: prompt {prompt.id!r} has {len(prompt.token_ids)} tokens. Only {room} leave room for "
                    f"rollout.max_new_tokens={config.rollout.max_new_tokens} within {limit} tokens.",
                )
