"""The arithmetic of ranks, models and batches, before anything is started and without importing torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from megarl.config.model_shape import ModelShape, read_hf_config, shape_from_hf
from megarl.config.problems import KeyPath, Problem, dotted
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError, MissingInputError

_TP: KeyPath = ("actor", "parallel", "tp_size")
_PP: KeyPath = ("actor", "parallel", "pp_size")
_NUM_RANKS: KeyPath = ("run", "num_ranks")
_MAX_NEW_TOKENS: KeyPath = ("rollout", "max_new_tokens")
_MODEL: KeyPath = ("model",)


def model_shape(config: RunConfig) -> ModelShape:
    """The shape of the model to train. Reads at most ``config.json``."""
    if config.model.path is not None:
        directory = Path(config.model.path)
        return shape_from_hf(read_hf_config(directory), str(directory / "config.json"))
    return shape_from_hf(config.model.config or {}, "model.config")


def max_sequence_length(config: RunConfig) -> int:
    """Tokens that a prompt and its response may have together."""
    positions = model_shape(config).max_positions
    if config.rollout is None:
        return positions
    return min(positions, config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)


def check_layout(config: RunConfig) -> list[Problem]:
    """Everything that does not divide or does not fit. A model whose shape cannot be read is left out of it."""
    try:
        shape = model_shape(config)
    except (ConfigError, MissingInputError):
        shape = None
    return [
        *_replicas(config),
        *(_split(config, shape) if shape else ()),
        *_batches(config),
        *_lengths(config, shape),
    ]


def _replicas(config: RunConfig) -> Iterator[Problem]:
    ranks, per_replica = config.run.num_ranks, config.model_parallel_size
    if ranks % per_replica:
        tp_size, pp_size = config.actor.parallel.tp_size, config.actor.parallel.pp_size
        above = -(-ranks // per_replica) * per_replica
        nearest = f"{above - per_replica} or {above}" if above > per_replica else f"{above}"
        yield Problem(
            "MRL-1101",
            f"run.num_ranks={ranks} is not a whole number of model replicas: "
            f"tp_size {tp_size} x pp_size {pp_size} = {per_replica} ranks per replica, "
            f"{ranks} / {per_replica} = {ranks / per_replica:.4g}.",
            (_NUM_RANKS, _TP, _PP),
            (f"Nearest run.num_ranks: {nearest}. Or choose tp_size x pp_size from: {_join(_divisors(ranks))}.",),
        )


def _split(config: RunConfig, shape: ModelShape) -> Iterator[Problem]:
    tp_size, pp_size = config.actor.parallel.tp_size, config.actor.parallel.pp_size
    parts = {"heads": shape.num_heads, "kv heads": shape.num_kv_heads, "mlp columns": shape.intermediate_size}
    broken = [f"{size} {part} / {tp_size}" for part, size in parts.items() if size % tp_size]
    if broken:
        verb = "is" if len(broken) == 1 else "are"
        valid = _valid_sizes(math.gcd(*parts.values()), config.run.num_ranks, pp_size)
        yield Problem(
            "MRL-1102",
            f"{dotted(_TP)}={tp_size} cannot split this model: {' and '.join(broken)} {verb} not whole.",
            (_TP, _MODEL),
            (f"Valid here: {_join(valid)}.",),
        )
    if shape.num_layers % pp_size:
        valid = _valid_sizes(shape.num_layers, config.run.num_ranks, tp_size)
        yield Problem(
            "MRL-1103",
            f"{dotted(_PP)}={pp_size} cannot split this model: {shape.num_layers} layers / {pp_size} is not whole.",
            (_PP, _MODEL),
            (f"Valid here: {_join(valid)}.",),
        )


def _batches(config: RunConfig) -> Iterator[Problem]:
    if config.run.num_ranks % config.model_parallel_size:
        return  # the number of replicas is unknown, and already complained about
    dp_size = config.dp_size
    needed = config.num_minibatches * dp_size
    parallel = (_NUM_RANKS, _TP, _PP)
    arithmetic = f"num_minibatches {config.num_minibatches} x data-parallel {dp_size} = {needed}"
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
    if config.warmup is not None and config.warmup.batch_size < dp_size:
        yield Problem(
            "MRL-1104",
            f"warmup.batch_size={config.warmup.batch_size} is too small: data-parallel {dp_size} needs one each.",
            (("warmup", "batch_size"), *parallel),
            (f"Set warmup.batch_size to {dp_size} or more.",),
        )


def _lengths(config: RunConfig, shape: ModelShape | None) -> Iterator[Problem]:
    """A prompt has at least one token, so a response must be shorter than whatever has to hold both."""
    if config.rollout is None:
        return
    longest = config.rollout.max_new_tokens
    if shape is not None and longest >= shape.max_positions:
        yield Problem(
            "MRL-1106",
            f"rollout.max_new_tokens={longest} leaves no room for a prompt: "
            f"the model has max_position_embeddings={shape.max_positions}.",
            (_MAX_NEW_TOKENS, _MODEL),
            (f"Use at most {shape.max_positions - 1}, minus the longest prompt.",),
        )
    if config.algorithm.name == "sft":
        return  # what is generated is only evaluated
    limit = config.actor.max_tokens_per_microbatch
    if longest >= limit:
        yield Problem(
            "MRL-1105",
            f"actor.max_tokens_per_microbatch={limit} cannot hold one sequence: "
            f"a prompt and rollout.max_new_tokens={longest}.",
            (("actor", "max_tokens_per_microbatch"), _MAX_NEW_TOKENS),
            (f"Use more than {longest} plus the longest prompt, or lower rollout.max_new_tokens.",),
        )


def _valid_sizes(whole: int, num_ranks: int, other_size: int) -> list[int]:
    """Sizes that divide ``whole`` and the ranks; if the ranks do not fit anyway, those that divide ``whole``."""
    sizes = [size for size in range(1, min(whole, num_ranks) + 1) if whole % size == 0]
    return [size for size in sizes if num_ranks % (size * other_size) == 0] or sizes


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _join(sizes: list[int]) -> str:
    return ", ".join(str(size) for size in sizes[:16]) + (", ..." if len(sizes) > 16 else "")
