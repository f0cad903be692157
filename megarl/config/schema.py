"""Every setting of a run, with its default, its limits and what it is for.

`docs/configuration.md` is generated from this file. What needs more than one setting to be checked is in
`consistency.py` (contradictions) and `layout.py` (arithmetic).
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from megarl.config.alerts import AlertSettings
from megarl.config.algorithms import AlgorithmSettings, CustomAlgorithm, PolicyLossSettings, PpoSettings, SftSettings
from megarl.config.chat import ChatSettings
from megarl.config.data import DataSettings
from megarl.config.evaluation import EvalSetSettings, EvalSettings
from megarl.config.generation import GenerationSettings, WeightsSettings
from megarl.config.launch import LaunchSettings
from megarl.config.measuring import HardwareSettings, MetricsSettings, MonitorSettings
from megarl.config.names import REWARD_MODEL, TokenizerName
from megarl.config.parallel import ParallelSettings
from megarl.config.rewards import Rewards, RewardSettings
from megarl.config.roles import (
    ActorSettings,
    CriticSettings,
    OptimizerSettings,
    ReferenceSettings,
    RewardModelSettings,
    WarmupSettings,
)
from megarl.config.rollout import RolloutSettings
from megarl.config.scoring import ScoringSettings
from megarl.config.section import REQUIRED, Section, section, setting
from megarl.config.tracking import TrackerKwargs, TrackWith

# the sections of other files that are known by this one's name
__all__ = ["ActorSettings", "CriticSettings", "OptimizerSettings", "ParallelSettings", "ReferenceSettings", "RunConfig"]

_MANY = 1_000_000_000
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"


class RunSettings(Section):
    """What the run is called, how long it is and where it runs."""

    name: str = setting(
        REQUIRED,
        "Name of the run and of its directory.",
        pattern=_NAME,
        rule="text of at most 100 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        elsewhere="experiment_name exp_name run_name",
    )
    dir: str = setting("runs", "Directory that holds the run's directory.", min_length=1, elsewhere="output_dir")
    seed: int = setting(0, "Every random draw of the run follows from it.", ge=0, le=2**63 - 1)
    num_steps: int = setting(
        REQUIRED,
        "Training steps: rounds of generating samples and learning from them.",
        ge=1,
        le=_MANY,
        elsewhere="max_steps total_steps total_training_steps steps",
    )
    num_ranks: int = setting(
        1,
        "Processes that train, over all machines.",
        ge=1,
        le=1_000_000,
        elsewhere="world_size nproc_per_node num_gpus",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA where it is found.")
    deterministic: bool = setting(
        False,
        "Use only kernels that give the same bits every time, which may be slower.",
        elsewhere="deterministic_mode full_determinism use_deterministic_algorithms",
    )


class ModelSettings(Section):
    """The model to train: a local Hugging Face directory, or a config to start from random weights."""

    path: str | None = setting(
        None,
        "Local Hugging Face directory with config.json and weights.",
        min_length=1,
        elsewhere="model_name_or_path pretrained pretrain model_path",
    )
    config: dict[str, Any] | None = setting(
        None, "Hugging Face config (the keys of a config.json), to start from random weights; only without model.path."
    )
    tokenizer: TokenizerName | None = setting(
        None,
        "Where the tokenizer is; null: in model.path.",
        rule="a directory with tokenizer.json, builtin:characters, or null",
        elsewhere="tokenizer_path",
    )
    dtype: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        "Weights and activations; auto: bf16 on CUDA, fp32 on CPU. Gradients and optimizer are always fp32.",
        elsewhere="torch_dtype precision params_dtype bf16 model_dtype",
    )


class CheckpointSettings(Section):
    """When the whole run is written down, and what is kept of it."""

    every: int = setting(
        10,
        "Steps between checkpoints; 0: only at the end and when the run is stopped.",
        ge=0,
        le=_MANY,
        elsewhere="save_freq save_interval save_steps checkpoint_interval",
    )
    keep: int = setting(
        2,
        "Newest checkpoints that are kept.",
        ge=1,
        le=1_000_000,
        elsewhere="max_actor_ckpt_to_keep max_critic_ckpt_to_keep save_total_limit max_ckpt_num keep_last max_to_keep",
    )
    best_metric: str | None = setting(
        None,
        "Also keep the checkpoint with the best value of this metric, such as eval/NAME/score/mean@1 or "
        "val/test_score/NAME; null: none.",
        min_length=1,
        elsewhere="metric_for_best_model",
    )
    best_mode: Literal["max", "min"] = setting(
        "max", "Whether a high or a low best_metric is good.", elsewhere="greater_is_better"
    )
    asynchronous: bool = setting(
        True, "Write while the next step runs.", elsewhere="async_save async_checkpointing use_async_checkpoint"
    )


class RunConfig(Section):
    """A whole run."""

    run: RunSettings = setting(REQUIRED, "What the run is called, how long it is and where it runs.")
    model: ModelSettings = setting(REQUIRED, "The model to train.")
    actor: ActorSettings = section(ActorSettings, "The policy that is trained.")
    critic: CriticSettings = section(CriticSettings, "The value model.")
    reference: ReferenceSettings = section(ReferenceSettings, "The reference model.")
    reward_model: RewardModelSettings = section(RewardModelSettings, "The model that scores samples.")
    algorithm: AlgorithmSettings = setting(REQUIRED, "How it learns.")
    warmup: WarmupSettings | None = setting(None, "Supervised steps before the algorithm starts; null: none.")
    rollout: RolloutSettings | None = setting(None, "What is generated in a step. Only sft can do without.")
    generation: GenerationSettings = section(GenerationSettings, "The engine that generates.")
    weights: WeightsSettings = section(WeightsSettings, "How new weights reach the engines.")
    data: DataSettings = setting(REQUIRED, "The prompts to train on.")
    chat: ChatSettings = section(ChatSettings, "How questions and conversations are put to the model.")
    reward: Rewards = Field(
        default_factory=lambda: [RewardSettings()], min_length=1, description="The reward function, or several."
    )
    scoring: ScoringSettings = section(ScoringSettings, "How rewards run.")
    eval: EvalSettings = section(EvalSettings, "When and on what the policy is evaluated.")
    checkpoint: CheckpointSettings = section(CheckpointSettings, "When the whole run is written down.")
    track_with: TrackWith = setting(
        ["stdout"],
        "Where metrics go beside the ledger; one or several.",
        rule="stdout, stdout_json, tensorboard, wandb or swanlab, or a list of them, which may be empty",
        elsewhere="logger trainer.logger report_to monitor_type",
    )
    tracker_kwargs: TrackerKwargs = setting(
        {}, "Options of the tracker; with several trackers, by tracker: {wandb: {project: ...}}.", rule="a mapping"
    )
    metrics: MetricsSettings = section(MetricsSettings, "What is measured and how it is spelled.")
    monitor: MonitorSettings = section(MonitorSettings, "The same settings in Trinity-RFT's spelling.")
    alerts: AlertSettings = section(AlertSettings, "When the run raises its voice.")
    launch: LaunchSettings = section(LaunchSettings, "How ranks are started and watched.")
    hardware: HardwareSettings = section(HardwareSettings, "What the devices could do at best.")

    @property
    def dp_size(self) -> int:
        """Copies of the actor, each fed with its own samples."""
        return self.dp_size_of(self.actor.parallel)

    def dp_size_of(self, parallel: ParallelSettings) -> int:
        """Copies of a model that is cut like this."""
        return self.run.num_ranks // parallel.model_parallel_size

    @property
    def critic_parallel(self) -> ParallelSettings:
        """How the critic is cut."""
        return self.critic.parallel or self.actor.parallel

    @property
    def reference_parallel(self) -> ParallelSettings:
        """How the reference model is cut."""
        return self.reference.parallel or self.actor.parallel

    @property
    def reward_model_parallel(self) -> ParallelSettings:
        """How the reward model is cut."""
        return self.reward_model.parallel or self.actor.parallel

    @property
    def critic_max_tokens(self) -> int:
        """Tokens of one forward pass of the critic per rank."""
        return self.critic.max_tokens_per_microbatch or self.actor.max_tokens_per_microbatch

    @property
    def reference_max_tokens(self) -> int:
        """Tokens of one forward pass of the reference model per rank."""
        return self.reference.max_tokens_per_microbatch or self.actor.max_tokens_per_microbatch

    @property
    def reward_model_max_tokens(self) -> int:
        """Tokens of one forward pass of the reward model per rank."""
        return self.reward_model.max_tokens_per_microbatch or self.actor.max_tokens_per_microbatch

    @property
    def generates(self) -> bool:
        """Whether any engine draws samples."""
        return self.rollout is not None and self.rollout.replay is None

    @property
    def only_generates(self) -> bool:
        """Whether the run records rollouts and trains nothing."""
        return self.rollout is not None and self.rollout.only

    @property
    def records(self) -> bool:
        """Whether rollouts are written down."""
        return self.rollout is not None and (self.rollout.record or self.rollout.only)

    @property
    def num_steps_ahead(self) -> int:
        """For how many steps samples are drawn before their step has come."""
        if self.rollout is None or not self.uses_servers or self.generation.colocated:
            return 0
        return self.rollout.max_staleness

    @property
    def uses_servers(self) -> bool:
        """Whether the engines are servers; if not, there is one inside each rank."""
        own = self.generation
        return self.generates and (own.engine == "sglang" or own.num_servers > 0 or bool(own.urls))

    @property
    def engine_shares_devices(self) -> bool:
        """Whether engines take memory of the trainer's devices, and have to make room."""
        return self.generates and (self.generation.colocated or not self.uses_servers)

    @property
    def uses_critic(self) -> bool:
        """Whether there is a value model."""
        return isinstance(self.algorithm, PpoSettings) and not self.only_generates

    @property
    def uses_reference(self) -> bool:
        """Whether there is a reference model."""
        is_penalised = isinstance(self.algorithm, PolicyLossSettings) and self.algorithm.kl.coef > 0
        return is_penalised and not self.only_generates

    @property
    def uses_reward_model(self) -> bool:
        """Whether there is a model that scores samples."""
        return self.generates and any(reward.name == REWARD_MODEL for reward in self.all_rewards)

    @property
    def eval_sets(self) -> list[tuple[Literal["eval", "bench"], str, EvalSetSettings]]:
        """All sets to evaluate: what they are reported under, their names and settings."""
        return [("eval", name, one) for name, one in self.eval.sets.items()] + [
            ("bench", name, one) for name, one in self.eval.bench_sets.items()
        ]

    @property
    def all_rewards(self) -> list[RewardSettings]:
        """The rewards of training and of all evaluation sets."""
        return [*self.reward, *(reward for _, _, one in self.eval_sets for reward in one.reward or ())]

    @property
    def has_own_functions(self) -> bool:
        """Whether conversations, or a reward of the run or of an evaluation set, are a function of the user's."""
        converses = self.rollout is not None and self.rollout.converse is not None
        return converses or any(reward.is_own for reward in self.all_rewards)

    @property
    def best_metric(self) -> str | None:
        """checkpoint.best_metric by its canonical name: val/test_score/NAME is veRL's for a set's mean score."""
        name = self.checkpoint.best_metric
        one = self.eval.sets.get(name.removeprefix("val/test_score/")) if name is not None else None
        if name is None or one is None or not name.startswith("val/test_score/"):
            return name
        return f"eval/{name.removeprefix('val/test_score/')}/score/mean@{one.num_samples}"

    @property
    def samples_per_step(self) -> int:
        """Sequences that a step learns from; 0 if nothing says how many."""
        if isinstance(self.algorithm, SftSettings):
            return self.algorithm.batch_size
        return self.rollout.prompts_per_step * self.rollout.group_size if self.rollout else 0

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps per pass over a step's samples."""
        return 1 if isinstance(self.algorithm, CustomAlgorithm) else self.algorithm.num_minibatches
