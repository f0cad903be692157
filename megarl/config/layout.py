"""The arithmetic of ranks, models and batches, before anything is started and without importing torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megarl.config.families import POLICY_HEADS, REWARD_HEADS, VALUE_HEADS, family_of
from megarl.config.model_shape import ModelShape, read_hf_config, shape_from_hf, value_shape_from_hf
from megarl.config.problems import KeyPath, Problem, dotted
from megarl.config.schema import RunConfig
from megarl.config.splits import Role, check_splits
from megarl.core.errors import ConfigError, MissingInputError

_NUM_RANKS: KeyPath = ("run", "num_ranks")
_MAX_NEW_TOKENS: KeyPath = ("rollout", "max_new_tokens")
_MODEL: KeyPath = ("model",)
_CRITIC_PATH: KeyPath = ("critic", "path")
_REWARD_PATH: KeyPath = ("reward_model", "path")


def model_shape(config: RunConfig) -> ModelShape:
    """The shape of the model to train. Reads at most ``config.json``."""
    if config.model.path is not None:
        directory = Path(config.model.path)
        return shape_from_hf(read_hf_config(directory), str(directory / "config.json"))
    return shape_from_hf(config.model.config or {}, "model.config")


def hf_config_of(config: RunConfig) -> dict[str, Any]:
    """The model's Hugging Face config, as a server of any kind reads it. Reads at most ``config.json``."""
    given = (
        read_hf_config(Path(config.model.path)) if config.model.path is not None else dict(config.model.config or {})
    )
    family = family_of(model_shape(config).architecture, POLICY_HEADS)
    assert family is not None, "checked with the configuration"
    return {"model_type": family.name, **given}


def critic_shape(config: RunConfig) -> ModelShape:
    """The shape of the value model: that of ``critic.path``, or the policy's with another head.

    Reads at most ``config.json``.
    """
    if config.critic.path is None:
        policy = model_shape(config)
        return replace(policy, architecture=policy.architecture.replace(*POLICY_HEADS, VALUE_HEADS[0]))
    directory = Path(config.critic.path)
    return value_shape_from_hf(read_hf_config(directory, dotted(_CRITIC_PATH)), str(directory / "config.json"))


def reward_shape(config: RunConfig) -> ModelShape:
    """The shape of the reward model. Reads at most ``config.json``."""
    directory = Path(config.reward_model.path or "")
    hf_config = read_hf_config(directory, dotted(_REWARD_PATH))
    return value_shape_from_hf(hf_config, str(directory / "config.json"), REWARD_HEADS)


def roles_of(config: RunConfig) -> list[Role]:
    """The models of the run; those whose layout and shape are the actor's are roles of their own too."""
    policy = _readable(config, model_shape)
    own = ("actor", "parallel")
    roles = [Role("actor", config.actor.parallel, own, policy, _MODEL)]
    if config.uses_critic:
        path = own if config.critic.parallel is None else ("critic", "parallel")
        is_policy = config.critic.path is None
        model = _MODEL if is_policy else _CRITIC_PATH
        roles.append(Role("critic", config.critic_parallel, path, _readable(config, critic_shape), model))
    if config.uses_reference:
        path = own if config.reference.parallel is None else ("reference", "parallel")
        roles.append(Role("reference", config.reference_parallel, path, policy, _MODEL))
    if config.uses_reward_model:
        path = own if config.reward_model.parallel is None else ("reward_model", "parallel")
        shape = _readable(config, reward_shape)
        roles.append(Role("reward_model", config.reward_model_parallel, path, shape, _REWARD_PATH))
    return roles


def _readable(config: RunConfig, read: Callable[[RunConfig], ModelShape]) -> ModelShape | None:
    try:
        return read(config)
    except (ConfigError, MissingInputError):
        return None


def max_sequence_length(config: RunConfig) -> int:
    """Tokens that a prompt and its response may have together, in training or in an evaluation."""
    positions = model_shape(config).max_positions
    if config.rollout is None:
        return positions
    own = [one.max_new_tokens for _, _, one in config.eval_sets if one.max_new_tokens is not None]
    return min(positions, config.rollout.max_prompt_tokens + max([config.rollout.max_new_tokens, *own]))


def max_prompt_tokens(config: RunConfig, max_new_tokens: int | None = None) -> int:
    """The longest prompt that leaves room for a response of so many tokens; None: of as many as in training."""
    positions = model_shape(config).max_positions
    if config.rollout is None:
        return positions
    return min(config.rollout.max_prompt_tokens, positions - (max_new_tokens or config.rollout.max_new_tokens))


def microbatch_tokens(config: RunConfig, role: str) -> int:
    """Tokens of one microbatch of a replica of ``role``: context-parallel ranks share them."""
    settings = {
        "actor": (config.actor.max_tokens_per_microbatch, config.actor.parallel),
        "critic": (config.critic_max_tokens, config.critic_parallel),
        "reference": (config.reference_max_tokens, config.reference_parallel),
        "reward_model": (config.reward_model_max_tokens, config.reward_model_parallel),
    }
    tokens_per_rank, parallel = settings[role]
    return tokens_per_rank * parallel.cp_size


def check_layout(config: RunConfig) -> list[Problem]:
    """Everything that does not divide or does not fit. A model whose shape cannot be read is left out of it."""
    roles = roles_of(config)
    # a role that is cut like the actor, and has its shape, has nothing to add
    distinct = {(role.path, role.model): role for role in reversed(roles)}
    return [
        *check_splits([role for role in roles if role in distinct.values()], config.run.num_ranks),
        *_batches(config, roles),
        *_lengths(config, roles),
        *_vocabularies(roles),
    ]


def _batches(config: RunConfig, roles: list[Role]) -> Iterator[Problem]:
    if any(config.run.num_ranks % role.parallel.model_parallel_size for role in roles):
        return  # the number of replicas is unknown, and already complained about
    trained = [role for role in roles if role.name in ("actor", "critic")]
    dp_size, most = max(((config.dp_size_of(role.parallel), role) for role in trained), key=lambda pair: pair[0])
    needed = config.num_minibatches * dp_size
    parallel = (_NUM_RANKS, *(most.key(size) for size in ("tp_size", "pp_size", "cp_size")))
    whose = "" if most.name == "actor" else f" of the {most.name}"
    arithmetic = f"num_minibatches {config.num_minibatches} x data-parallel {dp_size}{whose} = {needed}"
    if config.algorithm.name == "sft":
        if config.samples_per_step < needed:
            yield Problem(
                "MRL-1104",
                f"algorithm.batch_size={config.samples_per_step} is too small: {arithmetic} samples are the least.",
                (("algorithm", "batch_size"), ("algorithm", "num_minibatches"), *parallel),
                (f"Set algorithm.batch_size to {needed} or more.",),
            )
    elif config.rollout is not None and config.samples_per_step < needed:
        prompts, group_size = config.rollout.prompts_per_step, config.rollout.group_size
        yield Problem(
            "MRL-1104",
            f"a step has too few samples: {prompts} prompts x {group_size} = {prompts * group_size}, "
            f"but {arithmetic} are the least.",
            (("rollout", "prompts_per_step"), ("rollout", "group_size"), ("algorithm", "num_minibatches"), *parallel),
            (f"Set rollout.prompts_per_step to {-(-needed // group_size)} or more, or use fewer minibatches.",),
        )
    elif config.rollout is not None and config.rollout.prompts_per_step < config.num_minibatches:
        yield Problem(
            "MRL-1104",
            f"rollout.prompts_per_step={config.rollout.prompts_per_step} cannot fill "
            f"algorithm.num_minibatches={config.num_minibatches}: the samples of a prompt stay together.",
            (("rollout", "prompts_per_step"), ("algorithm", "num_minibatches")),
            (f"Set rollout.prompts_per_step to {config.num_minibatches} or more, or use fewer minibatches.",),
        )
    yield from _warmup_batches(config)


def _warmup_batches(config: RunConfig) -> Iterator[Problem]:
    if config.warmup is not None and config.warmup.batch_size < config.dp_size:
        parallel = (("actor", "parallel", size) for size in ("tp_size", "pp_size", "cp_size"))
        yield Problem(
            "MRL-1104",
            f"warmup.batch_size={config.warmup.batch_size} is too small: data-parallel {config.dp_size} needs one "
            "each.",
            (("warmup", "batch_size"), _NUM_RANKS, *parallel),
            (f"Set warmup.batch_size to {config.dp_size} or more.",),
        )


def _lengths(config: RunConfig, roles: list[Role]) -> Iterator[Problem]:
    """A prompt has at least one token, so a response must be shorter than whatever has to hold both."""
    if config.rollout is None:
        return
    longest = config.rollout.max_new_tokens
    for model, shape in {role.model: role.shape for role in roles}.items():
        if shape is not None and longest >= shape.max_positions:
            whose = "the model" if model == _MODEL else f"the model of {dotted(model)}"
            yield Problem(
                "MRL-1106",
                f"rollout.max_new_tokens={longest} leaves no room for a prompt: "
                f"{whose} has max_position_embeddings={shape.max_positions}.",
                (_MAX_NEW_TOKENS, model),
                (f"Use at most {shape.max_positions - 1}, minus the longest prompt.",),
            )
    yield from _eval_lengths(config, roles)
    if config.algorithm.name == "sft":
        return  # what is generated is only evaluated
    written = {
        "actor": config.actor.max_tokens_per_microbatch,
        "critic": config.critic.max_tokens_per_microbatch,
        "reference": config.reference.max_tokens_per_microbatch,
        "reward_model": config.reward_model.max_tokens_per_microbatch,
    }
    for role in roles:
        cp_size = role.parallel.cp_size
        owner = "actor" if written[role.name] is None else role.name
        is_the_actors = owner != role.name and cp_size == config.actor.parallel.cp_size
        if longest >= microbatch_tokens(config, role.name) and not is_the_actors:
            yield _too_long(longest, role, (owner, "max_tokens_per_microbatch"), microbatch_tokens(config, role.name))


def _eval_lengths(config: RunConfig, roles: list[Role]) -> Iterator[Problem]:
    policy = roles[0].shape
    for kind, name, one in config.eval_sets:
        if policy is not None and one.max_new_tokens is not None and one.max_new_tokens >= policy.max_positions:
            key: KeyPath = ("eval", "sets" if kind == "eval" else "bench_sets", name, "max_new_tokens")
            yield Problem(
                "MRL-1106",
                f"{dotted(key)}={one.max_new_tokens} leaves no room for a prompt: "
                f"the model has max_position_embeddings={policy.max_positions}.",
                (key, _MODEL),
                (f"Use at most {policy.max_positions - 1}, minus the longest prompt.",),
            )


def _too_long(longest: int, role: Role, key: KeyPath, limit: int) -> Problem:
    cp_size = role.parallel.cp_size
    shared = f" x cp_size {cp_size} = {limit} tokens" if cp_size > 1 else ""
    whose = "" if key[0] == role.name else f" of the {role.name}"
    return Problem(
        "MRL-1105",
        f"{dotted(key)}={limit // cp_size}{shared} cannot hold one sequence{whose}: "
        f"a prompt and rollout.max_new_tokens={longest}.",
        (key, _MAX_NEW_TOKENS),
        (
            f"Use at least {-(-(longest + 1) // cp_size)}, plus room for the longest prompt, "
            "or lower rollout.max_new_tokens.",
        ),
    )


def _vocabularies(roles: list[Role]) -> Iterator[Problem]:
    policy = roles[0].shape
    for role in roles:
        if policy is not None and role.shape is not None and role.shape.vocab_size < policy.vocab_size:
            yield Problem(
                "MRL-1113",
                f"{dotted(role.model)}: its vocab_size={role.shape.vocab_size} is smaller than the policy's "
                f"{policy.vocab_size}, so it cannot read every token that the policy writes.",
                (role.model, _MODEL),
                (f"Choose a model with the policy's tokenizer and vocab_size {policy.vocab_size} or more.",),
            )
