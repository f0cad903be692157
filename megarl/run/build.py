"""The only place that chooses: from a configuration to the objects that the loop runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megarl.algorithms.choose import build_algorithm
from megarl.algorithms.sft import Sft
from megarl.algorithms.untrained import Untrained
from megarl.checkpoint.store import CheckpointStore
from megarl.config import schema
from megarl.config.algorithms import CustomAlgorithm, PpoSettings, SftSettings
from megarl.config.phases import leaves_device, phases
from megarl.core.protocols import Annotator, OffloadPart
from megarl.core.world import World
from megarl.metrics.at_k import at_k, best_of, bootstrap_best_of
from megarl.models.hf_weights import WeightSource
from megarl.models.memory import weights_part
from megarl.models.optim import OptimizerSettings
from megarl.models.reward import RewardModel
from megarl.rollout.serving import GENERATE
from megarl.run.answering import build_answering
from megarl.run.checkpoints import Checkpoints, SavePlan
from megarl.run.engines import Connected, Engines, InRankEngines
from megarl.run.eval_schedule import Schedule
from megarl.run.evaluate import EvalSet, Evaluator, NoEvaluation, sampling_of
from megarl.run.inputs import Inputs
from megarl.run.kept_samples import KeptSamples
from megarl.run.model_scorer import ModelScorer
from megarl.run.recorder import Recorder
from megarl.run.residency import Residency
from megarl.run.roles import (
    Models,
    SamePlans,
    build_frozen_policy,
    build_models,
    build_reward_model,
    forward_plan,
    run_dtype,
)
from megarl.run.rollout_builder import RolloutBuilder
from megarl.run.servers import ServerEngines
from megarl.run.stage import LearningModel, Rollouts, Stage
from megarl.run.state import Parts, RunState
from megarl.run.stop import StopRequest
from megarl.run.sync import UPDATE
from megarl.run.timeline import Timelines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that the loop needs."""

    world: World
    stages: Sequence[Stage]
    residency: Residency
    evaluator: Evaluator | NoEvaluation
    recorder: Recorder
    checkpoints: Checkpoints
    samples: KeptSamples
    timelines: Timelines
    # ends what was started for the run
    close: Callable[[], None]

    def stages_after(self, num_done: int) -> list[Stage]:
        """The stages that have steps left when ``num_done`` are done."""
        return [stage for stage in self.stages if stage.last_step > num_done]

    def phases_after(self, step: int) -> tuple[str, ...]:
        """The phases that may come first after ``step``."""
        following = self.stages_after(step) or self.stages[-1:]
        return following[0].first_phases


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What evaluates weights that are not trained."""

    evaluator: Evaluator
    # ends what was started for it
    close: Callable[[], None]


class Builder:
    """Builds the parts of a run in the order in which they need each other. Collective."""

    def __init__(self, config: schema.RunConfig, inputs: Inputs, world: World, recorder: Recorder) -> None:
        self._config = config
        self._inputs = inputs
        self._world = world
        self._recorder = recorder
        self._warmup_steps = config.warmup.num_steps if config.warmup else 0
        self._temperature = config.rollout.temperature if config.rollout else 1.0
        self._algorithm = build_algorithm(config.algorithm)
        self._directory = Path(config.run.dir) / config.run.name
        self._rollouts = RolloutBuilder(config, inputs, world, self._directory / "rollouts")

    def build(self, store: CheckpointStore, stop: StopRequest) -> Run:
        """The run, with all models on the device and random or loaded weights in them."""
        optimizers = {"actor": self._actor_optimizer(), "critic": self._critic_optimizer()}
        models = build_models(self._config, self._world, optimizers, self._temperature)
        engines = self._engines()
        residency = self._residency(models.parts, engines)
        self._judge_with(models.reward_model)
        generation = engines.connect(models.policy.export, residency) if engines else None
        stages = [self._warmup_stage(models, residency)] if self._config.warmup else []
        stages.append(self._main_stage(models, generation, residency))
        ends = tuple(stage.last_step for stage in stages)
        evaluator: Evaluator | NoEvaluation = NoEvaluation()
        if generation and not self._config.only_generates:
            evaluator = self._evaluator(generation, residency, ends)
        parts = Parts(
            models.stateful,
            self._rollouts.streams,
            generation.sync if generation else None,
            self._rollouts.ahead,
            self._algorithm,
            self._recorder,
            run_dtype(self._config, self._world.device),
            self._inputs.train_hashes,
        )
        state = RunState(self._config, self._world, parts)
        plan = SavePlan(self._config.checkpoint, ends[-1], self._config.best_metric)
        checkpoints = Checkpoints(store, plan, state, residency, stop, self._world)
        directory = self._directory
        kept = self._config.rollout.kept_groups if self._config.rollout else 0
        samples = KeptSamples(directory / "samples", kept, ends[-1], self._world)
        timelines = Timelines(residency.timeline, directory / "timeline.jsonl", ends[-1], self._world)
        close = engines.close if engines else _nothing
        return Run(self._world, stages, residency, evaluator, self._recorder, checkpoints, samples, timelines, close)

    def build_evaluation(self, source: WeightSource) -> Evaluation:
        """What evaluates the weights of ``source``: no optimizer, no critic, no reference."""
        engines = self._engines()
        assert engines is not None, "an evaluation generates"
        policy = build_frozen_policy(self._config, self._world, source)
        reward_model = build_reward_model(self._config, self._world)
        parts: dict[str, OffloadPart] = {"actor.weights": weights_part(policy.chunks)}
        residency = self._residency({**parts, **(reward_model.parts if reward_model else {})}, engines)
        generation = engines.connect(policy.export, residency)
        self._judge_with(reward_model)
        return Evaluation(self._evaluator(generation, residency, (0,)), engines.close)

    def _judge_with(self, model: RewardModel | None) -> None:
        """Let the reward `model` be this model."""
        if model is not None:
            plan = forward_plan(self._config, "reward_model", self._config.reward_model_parallel, model.model.shape)
            self._inputs.judge_with(ModelScorer(model, plan))

    def _engines(self) -> Engines | None:
        config = self._config
        if not config.generates:
            return None
        if config.uses_servers:
            return ServerEngines(config, self._world, self._directory, logger.warning)
        return InRankEngines(config, self._world)

    def _residency(self, of_models: Mapping[str, OffloadPart], engines: Engines | None) -> Residency:
        config = self._config
        parts: dict[str, OffloadPart] = {**(engines.parts if engines else {}), **of_models}
        pinned = frozenset(name for name in parts if not leaves_device(config, name.partition(".")[0]))
        table = {phase.name: phase.parts for phase in phases(config)}
        measures = config.metrics.memory != "off"
        return Residency(parts, pinned, table, self._world.device, measures_memory=measures)

    def _warmup_stage(self, models: Models, residency: Residency) -> Stage:
        warmup = self._config.warmup
        assert warmup is not None
        settings = _optimizer(warmup.optimizer, warmup.num_steps, updates_per_step=1)
        return Stage(
            name="warmup",
            headline=f"Warm-up: {warmup.num_steps} supervised steps on {warmup.batch_size} demonstrations each",
            first_step=1,
            last_step=warmup.num_steps,
            rollouts=self._rollouts.shown("warmup", "warm-up demonstrations", warmup.batch_size, residency.phase),
            algorithm=Sft(),
            annotators=[],
            learners=lambda _: [models.policy],
            plan=SamePlans(self._config, 1, "token-mean").policy,
            begin=lambda: models.policy.begin_stage(settings, 1.0),
            resume=lambda: models.policy.configure(settings, 1.0),
            first_phases=(models.policy.train_phase,),
        )

    def _main_stage(self, models: Models, generation: Connected | None, residency: Residency) -> Stage:
        config = self._config
        settings = config.algorithm
        supervised = isinstance(settings, SftSettings)
        rollouts: Rollouts
        if isinstance(settings, SftSettings):
            rollouts = self._rollouts.shown("main", "demonstrations", settings.batch_size, residency.phase)
        else:
            rollouts = self._rollouts.played(generation.serving if generation else None, residency.phase)
        aggregation = "token-mean" if isinstance(settings, CustomAlgorithm) else settings.loss_aggregation
        plans = SamePlans(config, config.num_minibatches, aggregation)
        critic = plans.critic(models)
        policy = None if supervised or config.only_generates else models.policy
        known: list[Annotator | None] = [plans.reference(models), policy, critic]
        critic_only_until = self._warmup_steps
        if isinstance(config.algorithm, PpoSettings):
            critic_only_until += config.algorithm.critic_warmup_steps

        def learners(step: int) -> Sequence[LearningModel]:
            if config.only_generates:
                return []
            critics = [critic] if critic else []
            return critics if step <= critic_only_until else [*critics, models.policy]

        temperature = 1.0 if supervised else self._temperature

        def begin() -> None:
            residency.onload(
                ("actor.weights", "actor.optimizer", "critic.weights", "critic.optimizer", "reference.weights")
            )
            models.policy.begin_stage(self._actor_optimizer(), temperature)
            if self._warmup_steps == 0:
                return  # all models were read from where the policy was
            if models.reference is not None:
                models.reference.copy_from(models.policy.model)
            if models.critic is not None and config.critic.path is None:
                models.critic.copy_from(models.policy.model)

        return Stage(
            name="main",
            headline=_headline(config),
            first_step=self._warmup_steps + 1,
            last_step=self._warmup_steps + config.run.num_steps,
            rollouts=rollouts,
            algorithm=Untrained(self._algorithm) if config.only_generates else self._algorithm,
            annotators=[annotator for annotator in known if annotator is not None],
            learners=learners,
            plan=plans.policy,
            begin=begin,
            resume=lambda: models.policy.configure(self._actor_optimizer(), temperature),
            first_phases=(UPDATE, GENERATE) if config.generates and not supervised else (models.policy.train_phase,),
        )

    def _evaluator(self, generation: Connected, residency: Residency, stage_ends: tuple[int, ...]) -> Evaluator:
        config, rollout = self._config, self._config.rollout
        assert rollout is not None, "checked with the configuration"
        sets = [
            EvalSet(
                name,
                kind,
                self._inputs.eval_prompts.get((kind, name), []),
                settings.num_samples,
                sampling_of(settings, rollout, self._inputs.encoder.stop_token_ids),
                self._inputs.eval_scorers.get((kind, name), self._inputs.scorer),
            )
            for kind, name, settings in config.eval_sets
        ]
        schedule = Schedule(config.eval.every, config.eval.before_training, config.eval.at_end, stage_ends)
        best = best_of if config.metrics.best_of == "exact" else bootstrap_best_of
        detailed = config.metrics.detailed_stats or config.monitor.detailed_stats
        summarise = partial(at_k, detailed=detailed, best=best)
        answering = build_answering(config, self._inputs, generation.serving, residency.phase, self._world)
        return Evaluator(sets, schedule, answering, residency.phase, config.run.seed, summarise)

    def _actor_optimizer(self) -> OptimizerSettings:
        config = self._config
        learning_steps = config.run.num_steps
        if isinstance(config.algorithm, PpoSettings):
            learning_steps = max(1, learning_steps - config.algorithm.critic_warmup_steps)
        return _optimizer(config.actor.optimizer, learning_steps, self._updates_per_step())

    def _critic_optimizer(self) -> OptimizerSettings:
        return _optimizer(self._config.critic.optimizer, self._config.run.num_steps, self._updates_per_step())

    def _updates_per_step(self) -> int:
        return self._algorithm.num_epochs * self._config.num_minibatches


def _headline(config: schema.RunConfig) -> str:
    steps, samples = config.run.num_steps, config.samples_per_step
    if config.only_generates:
        return f"Rollouts only: {steps} steps of {samples} samples; nothing is trained"
    text = f"{config.algorithm.name}: {steps} steps of {samples} samples"
    if config.rollout is not None and config.rollout.replay is not None:
        text += f" from {config.rollout.replay}; there is no engine, and nothing is evaluated"
    return text


def _nothing() -> None:
    """For runs that started nothing."""


def _optimizer(settings: schema.OptimizerSettings, num_steps: int, updates_per_step: int) -> OptimizerSettings:
    return OptimizerSettings(
        lr=settings.lr,
        num_updates=num_steps * updates_per_step,
        min_lr_ratio=settings.min_lr_ratio,
        schedule=settings.schedule,
        warmup_updates=settings.warmup_steps * updates_per_step,
        weight_decay=settings.weight_decay,
        beta1=settings.beta1,
        beta2=settings.beta2,
        eps=settings.eps,
        grad_clip=settings.grad_clip,
    )
