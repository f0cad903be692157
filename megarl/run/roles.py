"""The models of a run: each with its own layout, its own options, and the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megarl.config.algorithms import LossAggregation
from megarl.config.layout import critic_shape, microbatch_tokens, model_shape, reward_shape
from megarl.config.megatron_fields import split_megatron
from megarl.config.model_shape import ModelShape, read_hf_config
from megarl.config.parallel import ParallelSettings
from megarl.config.roles import ActorSettings, CriticSettings, ReferenceSettings, RewardModelSettings, TrainedSettings
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
from megarl.models.hf_weights import WeightSource, safetensors_weights
from megarl.models.optim import OptimizerSettings, TrainingOptions
from megarl.models.policy import Policy
from megarl.models.reference import Reference
from megarl.models.reward import RewardModel
from megarl.models.setup import lay_out


@dataclass(frozen=True, slots=True)
class Models:
    """The models of a run; those that it does not use are None."""

    policy: Policy
    critic: Critic | None
    reference: Reference | None
    reward_model: RewardModel | None

    @property
    def parts(self) -> dict[str, OffloadPart]:
        """What of them can leave the device."""
        models = (self.policy, self.critic, self.reference, self.reward_model)
        return {name: part for model in models if model is not None for name, part in model.parts.items()}

    @property
    def stateful(self) -> dict[str, Stateful]:
        """Those whose state a checkpoint holds, by role. The reward model is read again from where it is."""
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
    return Models(policy, critic, reference, build_reward_model(config, world))


def build_frozen_policy(config: RunConfig, world: World, source: WeightSource) -> LanguageModel:
    """The policy with the weights of ``source``, only to be looked at. Collective."""
    options = _options(config, config.actor, run_dtype(config, world.device))
    model = LanguageModel(model_shape(config), lay_out(world, config.actor.parallel), options, source)
    for chunk in model.chunks:
        chunk.requires_grad_(False)
    return model


def build_reward_model(config: RunConfig, world: World) -> RewardModel | None:
    """The model that scores samples, with its weights in it; None for runs without. Collective."""
    if not config.uses_reward_model:
        return None
    assert config.reward_model.path is not None, "checked with the configuration"
    path = Path(config.reward_model.path)
    layout = lay_out(world, config.reward_model_parallel)
    options = _options(config, config.reward_model, run_dtype(config, world.device))
    source = safetensors_weights(path, "reward_model.path", fresh_head=False)
    model = ValueModel(reward_shape(config), layout, options, source)
    return RewardModel(model, read_hf_config(path, "reward_model.path").get("pad_token_id"))


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
        plan = forward_plan(self._config, role, parallel, shape)
        return replace(plan, num_minibatches=self._num_minibatches, loss_aggregation=self._aggregation)


def forward_plan(config: RunConfig, role: str, parallel: ParallelSettings, shape: ModelShape) -> PackPlan:
    """How sequences are cut for one pass of a model over all of them."""
    return PackPlan(
        config.dp_size_of(parallel),
        num_minibatches=1,
        max_tokens_per_microbatch=microbatch_tokens(config, role),
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
    config: RunConfig,
    role: ActorSettings | CriticSettings | ReferenceSettings | RewardModelSettings,
    dtype: torch.dtype,
) -> ModelOptions:
    transformer, _, _ = split_megatron(role.megatron)
    return ModelOptions(
        dtype=dtype,
        recompute=role.recompute if isinstance(role, TrainedSettings) else "none",
        logprob_chunk_tokens=(role.logprob_chunk_tokens if isinstance(role, ActorSettings | ReferenceSettings) else 0),
        deterministic=config.run.deterministic,
        megatron=transformer,
    )


def _training(role: ActorSettings | CriticSettings) -> TrainingOptions:
    _, optimizer, ddp = split_megatron(role.megatron)
    return TrainingOptions(
        role.overlap_grad_reduce, role.overlap_param_gather, role.optimizer.cpu_offload, optimizer, ddp
    )
