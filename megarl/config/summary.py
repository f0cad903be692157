"""What `megarl check` prints: layout, batch arithmetic and phase table of a configuration, as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.algorithms import PolicyLossSettings, PpoSettings
from megarl.config.layout import max_sequence_length, model_shape, roles_of
from megarl.config.model_shape import ModelShape
from megarl.config.parallel import ParallelSettings
from megarl.config.phases import on_device, phases, residents
from megarl.config.problems import show
from megarl.config.rollout import RolloutSettings
from megarl.config.schema import RunConfig
from megarl.config.tokenizer_files import template_of

_MAX_ROWS = 16


def summarise(config: RunConfig) -> str:
    """The whole report, ending in a newline."""
    shape = model_shape(config)
    parts = [
        _model(config, shape),
        _layout(config),
        _batch(config),
        _phases(config),
        _checkpoints(config),
    ]
    return "\n\n".join(parts) + "\n"


def rank_of(config: RunConfig, tp: int, pp: int, dp: int) -> int:
    """The actor's global rank at these coordinates, the first of its context-parallel ranks.

    Tensor-parallel peers are neighbours, then come context-parallel ones; stages are furthest apart.
    """
    parallel = config.actor.parallel
    return tp + parallel.tp_size * parallel.cp_size * (dp + config.dp_size * pp)


def _model(config: RunConfig, shape: ModelShape) -> str:
    origin = f"from {show(config.model.path)}" if config.model.path is not None else "random weights"
    rows = [
        ("architecture", f"{shape.architecture}, {origin}"),
        ("size", f"{shape.num_parameters:,} parameters"),
        ("layers", f"{shape.num_layers} of hidden size {shape.hidden_size}, mlp {shape.intermediate_size}"),
        ("attention", f"{shape.num_heads} heads, {shape.num_kv_heads} kv heads, head size {shape.head_dim}"),
        *_expert_rows(shape),
        ("vocabulary", f"{shape.vocab_size:,} tokens, at most {shape.max_positions:,} positions"),
        ("chat template", str(template_of(config) or "none: prompts are plain text")),
    ]
    return "Model\n" + _table(rows)


def _expert_rows(shape: ModelShape) -> list[tuple[str, str]]:
    experts = shape.experts
    if experts is None:
        return []
    shared = f", shared expert {experts.shared_intermediate_size}" if experts.shared_intermediate_size else ""
    text = f"{experts.num_experts_per_token} of {experts.num_experts} per token, mlp {experts.intermediate_size}"
    return [("experts", f"{text}{shared}, in {shape.num_sparse_layers} layers")]


def _layout(config: RunConfig) -> str:
    """The ranks of the actor, then one line per model."""
    parallel = config.actor.parallel
    shared = f" x cp {parallel.cp_size}" if parallel.cp_size > 1 else ""
    product = f"tp {parallel.tp_size} x pp {parallel.pp_size}{shared} x dp {config.dp_size}"
    title = f"Layout: {config.run.num_ranks} ranks = {product}, device {config.run.device}"
    return "\n".join((title, _places(config), "", _table(_role_rows(config))))


def _role_rows(config: RunConfig) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("model", "cut", "replicas (dp)", "layers per stage", "weights per rank")]
    for role in roles_of(config):
        if role.shape is not None:
            cells = (
                role.name,
                _cut(role.parallel),
                str(config.dp_size_of(role.parallel)),
                _stages(role.parallel.layers_of_stages(role.shape.num_layers)),
                f"{_largest_share(role.parallel, role.shape):,}",
            )
            rows.append(cells)
    return rows


def _stages(layers: tuple[int, ...]) -> str:
    if len(set(layers)) == 1:
        return f"{layers[0]} in each of {len(layers)}" if len(layers) > 1 else f"{layers[0]}"
    return ", ".join(str(count) for count in layers[:_MAX_ROWS]) + (", ..." if len(layers) > _MAX_ROWS else "")


def _cut(parallel: ParallelSettings) -> str:
    """The sizes that are above 1."""
    sizes = {
        "tp + sp" if parallel.sequence_parallel else "tp": parallel.tp_size,
        "pp": parallel.pp_size,
        "vpp": parallel.vpp_size,
        "cp": parallel.cp_size,
        "ep": parallel.ep_size,
    }
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    if parallel.etp_size is not None:
        parts.append(f"etp {parallel.etp_size}")
    return " x ".join(parts) or "whole"


def _largest_share(parallel: ParallelSettings, shape: ModelShape) -> int:
    """Weights on the rank with the most, to about a percent: what is on every rank of a stage is not counted apart."""
    counts = parallel.layers_of_stages(shape.num_layers)
    first_layers = [sum(counts[:stage]) for stage in range(len(counts))]
    shares = []
    for rank in range(parallel.pp_size):
        weights = shape.vocab_size * shape.hidden_size // parallel.tp_size if rank == 0 else 0
        if rank == parallel.pp_size - 1:
            # with tied embeddings the last stage has a copy of its own, unless it is the first one too
            head = shape.head_parameters or (shape.vocab_size * shape.hidden_size if parallel.pp_size > 1 else 0)
            weights += head // parallel.tp_size
        for stage in range(rank, len(counts), parallel.pp_size):
            for layer in range(first_layers[stage], first_layers[stage] + counts[stage]):
                weights += _layer_share(parallel, shape, layer)
        shares.append(weights)
    return max(shares)


def _layer_share(parallel: ParallelSettings, shape: ModelShape, layer: int) -> int:
    attention = shape.attention_parameters // parallel.tp_size
    if not shape.is_sparse(layer):
        return attention + shape.dense_parameters // parallel.tp_size
    experts = shape.expert_parameters // (parallel.ep_size * parallel.expert_tp_size)
    return attention + experts + shape.routing_parameters // parallel.tp_size


def _places(config: RunConfig) -> str:
    parallel, num_layers = config.actor.parallel, model_shape(config).num_layers
    layers = parallel.layers_of_stages(num_layers)
    rows = [("replica (dp)", "stage (pp)", "layers", "ranks (tp, cp)" if parallel.cp_size > 1 else "ranks (tp)")]
    total = config.dp_size * parallel.pp_size
    for place in range(min(total, _MAX_ROWS)):
        dp, pp = divmod(place, parallel.pp_size)
        first = rank_of(config, 0, pp, dp)
        last = first + parallel.tp_size * parallel.cp_size - 1
        chunks = range(pp, len(layers), parallel.pp_size)
        spans = [_span(sum(layers[:chunk]), sum(layers[: chunk + 1]) - 1) for chunk in chunks]
        rows.append((str(dp), str(pp), ", ".join(spans), _span(first, last)))
    more = f"\n  ... and {total - _MAX_ROWS} more rows" if total > _MAX_ROWS else ""
    return _table(rows) + more


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
    if len(config.data.train) > 1:
        total = sum(source.weight for source in config.data.train)
        shares = (f"{source.path} {source.weight / total:.1%}" for source in config.data.train)
        rows.append(("prompts", ", ".join(shares)))
    if algorithm.name == "sft" or config.rollout is None:
        rows.append(("samples per step", f"{config.samples_per_step} demonstrations"))
    else:
        rollout = config.rollout
        product = f"{rollout.prompts_per_step} prompts x {rollout.group_size} = {config.samples_per_step} samples"
        rows += [("samples per step", product), *_filters(rollout)]
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


def _filters(rollout: RolloutSettings) -> list[tuple[str, str]]:
    """What a step may lose, and how many prompts it draws at most to make up for that."""
    rows = [("filters", ", ".join(one.label for one in rollout.filters))] if rollout.filters else []
    if rollout.max_refills:
        most = rollout.prompts_per_step * (1 + rollout.max_refills)
        rows.append(("refills", f"at most {rollout.max_refills}: {most:,} prompts per step if nothing is kept"))
    return rows


def _generation(config: RunConfig) -> list[tuple[str, str]]:
    if config.rollout is None:
        return []
    if config.rollout.replay is not None:
        skipped = ", evaluation is left out" if config.eval_sets else ""
        return [("generation", f"none: samples are read from {config.rollout.replay}{skipped}")]
    length, slots = max_sequence_length(config), config.generation.num_slots
    text = f"{slots} sequences of at most {length:,} tokens at once per {'server' if config.uses_servers else 'rank'}"
    if config.generation.engine == "embedded":
        shape = model_shape(config)
        num_bytes = 4 * slots * length * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
        text += f", KV cache {num_bytes / 2**20:,.0f} MiB"
    rows = [("generation", text)]
    converse = config.rollout.converse
    if converse is not None:
        rows.append(("conversations", f"at most {converse.max_turns} turns each, led by {converse.name}"))
    if config.uses_servers:
        rows.append(("servers", _servers(config)))
    if config.num_steps_ahead:
        rows.append(("ahead", f"samples are drawn up to {config.num_steps_ahead} steps before they are trained on"))
    return rows


def _servers(config: RunConfig) -> str:
    own = config.generation
    if own.urls:
        return f"{len(own.urls)} of yours: {', '.join(own.urls)}"
    number = str(own.num_servers or "as many as fit")
    where = "on the trainer's devices" if own.colocated else "beside the trainer"
    return f"{number} {own.engine} to be started, {where}"


def _phases(config: RunConfig) -> str:
    models = residents(config)
    rows = [("phase", *models)]
    rows += [(phase.name, *(on_device(config, phase, model) for model in models)) for phase in phases(config)]
    return "Phases of a step, and what is on the device\n" + _table(rows)


def _checkpoints(config: RunConfig) -> str:
    settings = config.checkpoint
    when = f"every {settings.every} steps, at the end" if settings.every else "at the end"
    best = f" and the best by {settings.best_metric} ({settings.best_mode})" if settings.best_metric else ""
    how = "while the next step runs" if settings.asynchronous else "before the next step"
    rows = [
        ("when", f"{when} and when the run is stopped"),
        ("kept", f"the newest {settings.keep}{best}"),
        ("written", how),
    ]
    return "Checkpoints\n" + _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(f"  {line}" for line in lines)
