"""The models of a run: each with its own layout, its own options, and the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.config.algorithms import LossAggregation
from megarl.config.layout import critic_shape, microbatch_tokens, model_shape
from megarl.config.megatron_fields import split_megatron
from megarl.config.model_shape import ModelShape
from megarl.config.parallel import ParallelSettings
from megarl.config.roles import ActorSettings, CriticSettings, ReferenceSettings
from megarl.config.schema import RunConfig
from megarl.core.device import training_dtype
from megarl.core.protocols import OffloadPart
from megarl.core.slices import Stateful
from megarl.core.world import World
from megarl.data.plan import PackPlan
from megarl.data.relayout import AnnotatorElsewhere, LearnerElsewhere, Relayout
from megarl.models.build import ModelOptions
from megarl.models.critic import Critic
from megarl.models.decoder import LanguageModel, ValueModel, initial_weights
from megarl.models.optim import OptimizerSettings, TrainingOptions
from megarl.models.policy import Policy
from megarl.models.reference import Reference
from megarl.models.setup import lay_out


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run; those that it does not use are None."""

    policy: Policy
    critic: Critic | None
    reference: Reference | None

    @property
    def parts(self) -> dict[str, OffloadPart]:
        """What of them can leave the device."""
        present = (model for model in (self.policy, self.critic, self.reference) if model is not None)
        return {name: part for model in present for name, part in model.parts.items()}

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Those of the run, by role."""
        roles: dict[str, Stateful | None] = {
            "actor": self.policy,
            "critic": self.critic,
            "reference": self.reference,
        }
        return {role: model for role, model in roles.items() if model is not None}


def build_models(
    config: RunConfig, world: World, optimizers: Mapping[str, OptimizerSettings], temperature: float
) -> Models:
    """All models that the run uses, with random or loaded weights in them. Collective."""
    shape, dtype = model_shape(config), run_dtype(config, world.device)
    path = Path(config.model.path) if config.model.path else None
    source = initial_weights(shape, path, config.run.seed)
    actor = lay_out(world, config.actor.parallel)
    language_model = LanguageModel(shape, actor, _options(config, config.actor, dtype), source)
    policy = Policy(language_model, optimizers["actor"], _training(config.actor), temperature)
    critic = reference = None
    if config.uses_critic:
        own = Path(config.critic.path) if config.critic.path else None
        value_shape = critic_shape(config)
        setting = "critic.path" if own else "model.path"
        value_source = initial_weights(value_shape, own or path, config.run.seed, setting)
        layout = lay_out(world, config.critic_parallel)
        value_model = ValueModel(value_shape, layout, _options(config, config.critic, dtype), value_source)
        critic = Critic(value_model, optimizers["critic"], _training(config.critic))
    if config.uses_reference:
        layout = lay_out(world, config.reference_parallel)
        frozen = LanguageModel(shape, layout, _options(config, config.reference, dtype), source)
        reference = Reference(frozen, temperature)
    return Models(policy, critic, reference)


def run_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """The numbers that models compute in; main weights and gradients are fp32 in any case."""
    named = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return named.get(config.model.dtype, training_dtype(device))


class SamePlans:
    """One step's samples, cut for every model's layout: the same minibatches in different hands."""

    def __init__(self, config: RunConfig, num_minibatches: int, aggregation: LossAggregation) -> None:
        self._config = config
        self._num_minibatches = num_minibatches
        self._aggregation = aggregation

    @property
    def policy(self) -> PackPlan:
        """How a step is cut for the policy."""
        return self._plan("actor", self._config.actor.parallel, model_shape(self._config))

    def reference(self, models: Models) -> Reference | AnnotatorElsewhere | None:
        """The reference as an annotator of the policy's batches."""
        model, config = models.reference, self._config
        if model is None:
            return None
        plan = self._plan("reference", config.reference_parallel, model.model.shape)
        relayout = self._relayout(models, model.model.layout.world, plan)
        return model if relayout.identity else AnnotatorElsewhere(model, relayout)

    def critic(self, models: Models) -> Critic | LearnerElsewhere | None:
        """The critic as an annotator of the policy's batches, and a learner from them."""
        model, config = models.critic, self._config
        if model is None:
            return None
        plan = self._plan("critic", config.critic_parallel, model.model.shape)
        relayout = self._relayout(models, model.model.layout.world, plan)
        return model if relayout.identity else LearnerElsewhere(model, relayout)

    def _relayout(self, models: Models, target: World, plan: PackPlan) -> Relayout:
        return Relayout(models.policy.model.layout.world, self.policy, target, plan)

    def _plan(self, role: str, parallel: ParallelSettings, shape: ModelShape) -> PackPlan:
        return PackPlan(
            self._config.dp_size_of(parallel),
            self._num_minibatches,
            microbatch_tokens(self._config, role),
            self._aggregation,
            # ranks that share experts meet inside every forward pass; a group of them may reach over replicas
            same_count=parallel.tp_size % (parallel.ep_size * parallel.expert_tp_size) != 0,
            count_multiple=parallel.pp_size if parallel.vpp_size > 1 else 1,
            attention_cost=_attention_cost(shape),
        )


def _attention_cost(shape: ModelShape) -> float:
    """Arithmetic of attention over one more token, as a share of what a token costs in a layer's matrices."""
    experts = shape.experts
    mlp_size = shape.intermediate_size
    if experts is not None:
        mlp_size = experts.num_experts_per_token * experts.intermediate_size + experts.shared_intermediate_size
    return shape.num_heads * shape.head_dim / (shape.attention_parameters + 3 * shape.hidden_size * mlp_size)


def _options(
    config: RunConfig, role: ActorSettings | CriticSettings | ReferenceSettings, dtype: torch.dtype
) -> ModelOptions:
    transformer, _, _ = split_megatron(role.megatron)
    return ModelOptions(
        dtype=dtype,
        recompute="none" if isinstance(role, ReferenceSettings) else role.recompute,
        logprob_chunk_tokens=0 if isinstance(role, CriticSettings) else role.logprob_chunk_tokens,
        deterministic=config.run.deterministic,
        megatron=transformer,
    )


def _training(role: ActorSettings | CriticSettings) -> TrainingOptions:
    _, optimizer, ddp = split_megatron(role.megatron)
    return TrainingOptions(
        role.overlap_grad_reduce, role.overlap_param_gather, role.optimizer.cpu_offload, optimizer, ddp
    )
