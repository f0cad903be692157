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
    num_steps: int = 2,
    max_tokens: int = 128,
    offload: bool = False,
    num_groups: int = 6,
    group_size: int = 4,
) -> dict[str, Any]:
    """``num_steps`` training steps on the same recorded groups: metrics per step (driver) and final weights (all
    ranks).
    """
    from megarl.algorithms.choose import build_algorithm
    from megarl.config.algorithms import GrpoSettings, PpoSettings
    from megarl.config.model_shape import read_hf_config, shape_from_hf
    from megarl.data.distribute import distribute
    from megarl.data.pack import PackPlan, pack
    from megarl.metrics.meter import Meter
    from megarl.metrics.reduce import reduce_to_driver
    from megarl.models.critic import Critic
    from megarl.models.decoder import LanguageModel, build_value_module
    from megarl.models.hf_weights import random_weights, safetensors_weights
    from megarl.models.optim import OptimizerSettings
    from megarl.models.policy import Policy
    from megarl.models.reference import Reference

    shape = shape_from_hf(read_hf_config(Path(directory)), directory)
    settings = PpoSettings(**algorithm) if algorithm["name"] == "ppo" else GrpoSettings(**algorithm)
    chosen = build_algorithm(settings)
    optimizer = OptimizerSettings(lr=1e-3, num_updates=100, eps=1e-5, grad_clip=1.0)
    policy = Policy(LanguageModel(shape, world, safetensors_weights(Path(directory))), world, optimizer, 0.9)
    # another set of weights, or every KL would be zero
    reference = Reference(LanguageModel(shape, world, random_weights(SEED, 0.1)), world, 0.9)
    critic = None
    annotators: list[Any] = [reference, policy]
    learners: list[Any] = [policy]
    if algorithm["name"] == "ppo":
        critic = Critic(build_value_module(shape, world, _value_source(SEED)), world, optimizer)
        annotators.append(critic)
        learners.insert(0, critic)
    parts = {**policy.parts, **reference.parts, **(critic.parts if critic else {})}
    groups = recorded_groups(num_groups, group_size, shape.vocab_size) if world.is_driver else []
    chosen.credit_groups(groups, Meter())
    plan = PackPlan(world.dp.size, settings.num_minibatches, max_tokens, settings.loss_aggregation)
    records, freed = [], []
    for _ in range(num_steps):
        meter = Meter()
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
        records.append(reduce_to_driver(meter, world))
    weights = {name: tensor.numpy().copy() for bucket in policy.export() for name, tensor in bucket}
    return {"metrics": records, "weights": weights, "freed": freed}


def _value_source(seed: int) -> Any:
    """Random weights with a value head that is not zero, so that the critic's values matter."""
    from megarl.models.hf_weights import random_weights

    source = random_weights(seed, 0.1)

    def with_head(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.linspace(-1, 1, shape[1])[None] if name == "value_head.weight" else source(name, shape)

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
