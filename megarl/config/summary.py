"""What `megarl check` prints: layout, batch arithmetic and phase table of a configuration, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.algorithms import PolicyLossSettings, PpoSettings
from megarl.config.layout import max_sequence_length, model_shape
from megarl.config.model_shape import ModelShape
from megarl.config.phases import on_device, phases, residents
from megarl.config.problems import show
from megarl.config.schema import RunConfig

_MAX_ROWS = 16


def summarise(config: RunConfig) -> str:
    """The whole report, ending in a newline."""
    shape = model_shape(config)
    parts = [
        _model(config, shape),
        _layout(config, shape),
        _batch(config),
        _phases(config),
        f"{config.run.name}: the configuration is valid.",
    ]
    return "\n\n".join(parts) + "\n"


def rank_of(config: RunConfig, tp: int, pp: int, dp: int) -> int:
    """The global rank at these coordinates: tensor-parallel peers are neighbours, stages are furthest apart."""
    return tp + config.actor.parallel.tp_size * (dp + config.dp_size * pp)


def _model(config: RunConfig, shape: ModelShape) -> str:
    origin = f"from {show(config.model.path)}" if config.model.path is not None else "random weights"
    rows = [
        ("architecture", f"{shape.architecture}, {origin}"),
        ("size", f"{shape.num_parameters:,} parameters"),
        ("layers", f"{shape.num_layers} of hidden size {shape.hidden_size}, mlp {shape.intermediate_size}"),
        ("attention", f"{shape.num_heads} heads, {shape.num_kv_heads} kv heads, head size {shape.head_dim}"),
        ("vocabulary", f"{shape.vocab_size:,} tokens, at most {shape.max_positions:,} positions"),
    ]
    return "Model\n" + _table(rows)


def _layout(config: RunConfig, shape: ModelShape) -> str:
    tp_size, pp_size = config.actor.parallel.tp_size, config.actor.parallel.pp_size
    layers = shape.num_layers // pp_size
    rows = [("replica (dp)", "stage (pp)", "layers", "ranks (tp)")]
    for dp in range(config.dp_size):
        for pp in range(pp_size):
            first, last = (rank_of(config, tp, pp, dp) for tp in (0, tp_size - 1))
            span = _span(pp * layers, (pp + 1) * layers - 1)
            rows.append((str(dp), str(pp), span, _span(first, last)))
            if len(rows) > _MAX_ROWS + 1:
                break
        if len(rows) > _MAX_ROWS + 1:
            break
    total = config.dp_size * pp_size
    more = f"\n  ... and {total - _MAX_ROWS} more rows" if total > _MAX_ROWS else ""
    title = (
        f"Layout: {config.run.num_ranks} ranks = tp {tp_size} x pp {pp_size} x dp {config.dp_size}, "
        f"device {config.run.device}"
    )
    return f"{title}\n" + _table(rows[: _MAX_ROWS + 1]) + more


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _batch(config: RunConfig) -> str:
    algorithm = config.algorithm
    num_epochs = algorithm.num_epochs if isinstance(algorithm, PolicyLossSettings) else 1
    updates = config.num_minibatches * num_epochs
    per_minibatch = config.samples_per_step / config.num_minibatches
    rows = []
    if config.warmup is not None:
        rows.append(("warmup", f"{config.warmup.num_steps} steps x {config.warmup.batch_size} demonstrations"))
    rows.append(("algorithm", f"{algorithm.name}, {config.run.num_steps} steps"))
    if algorithm.name == "sft" or config.rollout is None:
        rows.append(("samples per step", f"{config.samples_per_step} demonstrations"))
    else:
        rollout = config.rollout
        product = f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {config.samples_per_step} samples"
        rows.append(("samples per step", product))
    if isinstance(algorithm, PpoSettings) and algorithm.critic_warmup_steps:
        rows.append(("critic alone", f"for the first {algorithm.critic_warmup_steps} steps"))
    rows += [
        ("per minibatch", f"{per_minibatch:g} samples, {per_minibatch / config.dp_size:g} per replica"),
        (
            "optimizer steps",
            f"minibatches {config.num_minibatches} x epochs {num_epochs} = {updates} per step, "
            f"{updates * config.run.num_steps:,} in all",
        ),
        *_generation(config),
        ("microbatch", f"at most {config.actor.max_tokens_per_microbatch:,} tokens per rank"),
    ]
    return "Batch\n" + _table(rows)


def _generation(config: RunConfig) -> list[tuple[str, str]]:
    if config.rollout is None:
        return []
    shape, length, slots = model_shape(config), max_sequence_length(config), config.generation.num_slots
    num_bytes = 4 * slots * length * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    text = f"{slots} sequences of at most {length:,} tokens at once per rank, KV cache {num_bytes / 2**20:,.0f} MiB"
    return [("generation", text)]


def _phases(config: RunConfig) -> str:
    models = residents(config)
    rows = [("phase", *models)]
    rows += [(phase.name, *(on_device(config, phase, model) for model in models)) for phase in phases(config)]
    return "Phases of a step, and what is on the device\n" + _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(f"  {line}" for line in lines)
