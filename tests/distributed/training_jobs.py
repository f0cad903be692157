"""Jobs that train small models on recorded rollouts, for comparison between layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.core.sample import Group, Prompt, Sample

SEED = 7


def recorded_groups(num_groups: int = 6, group_size: int = 4, vocab_size: int = 99) -> list[Group]:
    """Rollouts of very uneven lengths with arbitrary rewards; one response is empty of learning (all masked)."""
    generator = np.random.default_rng(3)
    groups = []
    for g in range(num_groups):
        prompt_ids = generator.integers(0, vocab_size, generator.integers(1, 9))
        samples = []
        for s in range(group_size):
            length = int(generator.choice([1, 2, 5, 20, 60]))
            ids = generator.integers(0, vocab_size, length)
            mask = np.concatenate([np.zeros(len(prompt_ids)), np.ones(length)]).astype(np.int8)
            if (g, s) == (1, 2):
                mask[:] = 0
            samples.append(
                Sample(
                    token_ids=np.concatenate([prompt_ids, ids]),
                    loss_mask=mask,
                    rollout_logprobs=np.zeros(len(mask), dtype=np.float32),
                    finish="stop",
                    reward=float(generator.random()),
                )
            )
        groups.append(Group(Prompt(f"p{g}", "", prompt_ids), samples))
    return groups


def train_job(
    world: Any,
    directory: str,
    algorithm: dict[str, Any],
    sizes: dict[str, Any] | None = None,
    critic_sizes: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    num_steps: int = 2,
    max_tokens: int = 128,
    offload: bool = False,
    num_groups: int = 6,
    group_size: int = 4,
    lr: float = 1e-3,
) -> dict[str, Any]:
    """``num_steps`` training steps on the same recorded groups.

    Gives the metrics of every step (driver), this rank's pieces of the gradients of the first step's last optimizer
    step, and the final weights by name. ``critic_sizes``: another layout for critic and reference.
    """
    from megarl.algorithms.choose import build_algorithm
    from megarl.config.algorithms import GrpoSettings, PpoSettings
    from megarl.config.model_shape import read_hf_config, shape_from_hf
    from megarl.config.parallel import ParallelSettings
    from megarl.data.distribute import distribute
    from megarl.data.pack import pack
    from megarl.data.relayout import AnnotatorElsewhere, LearnerElsewhere, Relayout
    from megarl.metrics.meter import Meter
    from megarl.metrics.reduce import reduce_to_driver
    from megarl.models.build import ModelOptions
    from megarl.models.critic import Critic
    from megarl.models.decoder import LanguageModel, ValueModel
    from megarl.models.hf_weights import random_weights, safetensors_weights
    from megarl.models.optim import OptimizerSettings, TrainingOptions
    from megarl.models.policy import Policy
    from megarl.models.reference import Reference
    from megarl.models.setup import lay_out

    shape = shape_from_hf(read_hf_config(Path(directory)), directory)
    settings = PpoSettings(**algorithm) if algorithm["name"] == "ppo" else GrpoSettings(**algorithm)
    chosen = build_algorithm(settings)
    optimizer = OptimizerSettings(lr=lr, num_updates=100, eps=1e-5, grad_clip=1.0)
    model_options, training_options = ModelOptions(**options or {}), TrainingOptions(**training or {})
    layout = lay_out(world, ParallelSettings(**sizes or {}))
    other = lay_out(world, ParallelSettings(**critic_sizes)) if critic_sizes is not None else layout
    source = safetensors_weights(Path(directory))
    policy = Policy(LanguageModel(shape, layout, model_options, source), optimizer, training_options, 0.9)
    # another set of weights, or every KL would be zero
    reference = Reference(LanguageModel(shape, other, model_options, random_weights(SEED, 0.1)), 0.9)
    models: dict[str, Any] = {"actor": policy}
    roles: dict[str, Any] = {"reference": reference}
    if algorithm["name"] == "ppo":
        value_model = ValueModel(shape, other, model_options, _value_source(SEED))
        models["critic"] = roles["critic"] = Critic(value_model, optimizer, training_options)
    parts = {key: part for model in (policy, *roles.values()) for key, part in model.parts.items()}
    plan, other_plan = (_plan(settings, each, max_tokens) for each in (layout, other))
    if critic_sizes is not None:
        relayout = Relayout(layout.world, plan, other.world, other_plan)
        kinds = {"reference": AnnotatorElsewhere, "critic": LearnerElsewhere}
        roles = {name: kinds[name](model, relayout) for name, model in roles.items()}
    annotators = [roles["reference"], policy, *([roles["critic"]] if "critic" in roles else [])]
    learners = [*([roles["critic"]] if "critic" in roles else []), policy]
    groups = recorded_groups(num_groups, group_size, shape.vocab_size) if world.is_driver else []
    opening = Meter()
    chosen.credit_groups(groups, opening)
    records, freed, gradients = [], [], {}
    for step in range(num_steps):
        meter = opening if step == 0 else Meter()
        batch = distribute(pack(groups, plan) if world.is_driver else None, world)
        for annotator in annotators:
            batch = annotator.annotate(batch)
        if offload:
            freed.append(_cycle(parts))
        batch = chosen.credit_tokens(batch, world, meter)
        for learner in learners:
            meter.merge(learner.update(batch, chosen))
            if offload:
                freed.append(_cycle(parts))
        if step == 0:
            gradients = {role: gradient_pieces(model) for role, model in models.items()}
        records.append(reduce_to_driver(meter, world))
    weights = {
        role: {name: tensor.float().numpy().copy() for bucket in model.model.export() for name, tensor in bucket}
        for role, model in models.items()
    }
    return {"metrics": records, "gradients": gradients, "weights": weights, "freed": freed}


def _plan(settings: Any, layout: Any, max_tokens: int) -> Any:
    from megarl.data.plan import PackPlan

    return PackPlan(
        layout.world.dp.size,
        settings.num_minibatches,
        max_tokens,
        settings.loss_aggregation,
        same_count=layout.parallel.ep_size > 1,
        count_multiple=layout.parallel.pp_size if layout.parallel.vpp_size > 1 else 1,
    )


def gradient_pieces(model: Any) -> list[tuple[Any, ...]]:
    """This rank's shards of the gradients: (name, whole shape, offset, box shape, start, end, values)."""
    from dataclasses import replace

    state = model._saved
    pieces = []
    for entry, shard in state._shards():
        only_gradient = replace(shard, main=shard.main.grad, state={})
        for part in state._of(entry, only_gradient):
            box = part.box
            pieces.append(
                (box.name, box.whole_shape, box.offset, box.shape, part.start, part.end, part.tensor.clone().numpy())
            )
    return pieces


def assemble(pieces_of_ranks: list[list[tuple[Any, ...]]]) -> dict[str, np.ndarray]:
    """Whole gradients by name; every element must be there, and copies must agree."""
    boxes: dict[tuple[str, tuple[int, ...], tuple[int, ...]], np.ndarray] = {}
    wholes: dict[str, np.ndarray] = {}
    for pieces in pieces_of_ranks:
        for name, whole_shape, offset, shape, start, end, values in pieces:
            wholes.setdefault(name, np.full(whole_shape, np.nan, dtype=np.float32))
            box = boxes.setdefault((name, offset, shape), np.full(shape, np.nan, dtype=np.float32))
            box.reshape(-1)[start:end] = values
    for (name, offset, shape), box in boxes.items():
        wholes[name][tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = box
    for name, whole in wholes.items():
        assert np.isfinite(whole).all(), f"no rank has all of {name}"
    return wholes


def _value_source(seed: int) -> Any:
    """Random weights with a value head that is not zero, so that the critic's values matter."""
    from megarl.models.hf_weights import random_weights

    source = random_weights(seed, 0.1)

    def with_head(name: str, shape: tuple[int, ...], part: Any) -> torch.Tensor:
        return torch.linspace(-1, 1, shape[1])[None] if name == "score.weight" else source(name, shape, part)

    return with_head


def _cycle(parts: dict[str, Any]) -> int:
    """Offload everything and bring it back; the bytes that were gone in between."""
    before = sum(part.num_bytes for part in parts.values())
    for part in parts.values():
        part.offload()
    assert sum(part.num_bytes for part in parts.values()) == 0
    for part in parts.values():
        part.onload()
    return before
