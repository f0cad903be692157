"""Settings of the models of a run: actor, critic, reference and reward model, each cut and fed in its own way."""

from __future__ import annotations

from typing import Any, Literal

from megarl.config.parallel import ParallelSettings
from megarl.config.section import REQUIRED, Section, section, setting

_MANY = 1_000_000_000
_TOKENS = "max_tokens_per_gpu max_token_len_per_gpu micro_batch_size"
_CHUNK_TOKENS = "Tokens whose logits exist at once where log-probabilities are computed; 0: all of a microbatch."
_CHUNK_ELSEWHERE = "log_probs_chunk_size entropy_chunk_size"


class OptimizerSettings(Section):
    """AdamW and its learning rate."""

    lr: float = setting(1e-6, "Peak learning rate.", ge=0, le=1, elsewhere="learning_rate")
    min_lr_ratio: float = setting(
        1.0,
        "Learning rate at the end, as a fraction of lr. Not used by the constant schedule.",
        ge=0,
        le=1,
        elsewhere="min_lr_rate",
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = setting(
        "constant",
        "How lr falls to its end; wsd: constant for the first half, then linear.",
        elsewhere="lr_scheduler_type lr_schedule lr_decay_style",
    )
    warmup_steps: int = setting(
        0, "First steps, in which lr rises linearly from 0.", ge=0, le=_MANY, elsewhere="lr_warmup_steps"
    )
    weight_decay: float = setting(0.0, "AdamW's weight decay.", ge=0, le=10)
    beta1: float = setting(0.9, "AdamW's decay of the gradient's mean.", ge=0, lt=1, elsewhere="adam_beta1")
    beta2: float = setting(0.999, "AdamW's decay of the gradient's square.", ge=0, lt=1, elsewhere="adam_beta2")
    eps: float = setting(1e-8, "AdamW's epsilon.", gt=0, le=1, elsewhere="adam_epsilon adam_eps")
    grad_clip: float = setting(
        1.0, "Largest norm of the gradient; 0: off.", ge=0, le=1e9, elsewhere="max_grad_norm clip_grad"
    )
    cpu_offload: bool = setting(
        False,
        "Keep AdamW's moments and do its step on the host. Only with CUDA.",
        elsewhere="optimizer_cpu_offload offload_optimizer optimizer_offload",
    )


class CriticOptimizerSettings(OptimizerSettings):
    """As for the actor, with a higher learning rate."""

    lr: float = setting(1e-5, "Peak learning rate.", ge=0, le=1, elsewhere="learning_rate")


class WarmupOptimizerSettings(OptimizerSettings):
    """As for the actor, with a higher learning rate."""

    lr: float = setting(1e-5, "Peak learning rate.", ge=0, le=1, elsewhere="learning_rate")


class RoleSettings(Section):
    """What every model of a run has."""

    offload: bool = setting(
        True, "Leave the device in phases that do not need this model.", elsewhere="param_offload cpu_offload"
    )
    megatron: dict[str, Any] = setting(
        {},
        "Further fields of Megatron-Core's TransformerConfig, OptimizerConfig and DistributedDataParallelConfig.",
        elsewhere="override_transformer_config override_config strategy_config",
    )


class ReferenceSettings(RoleSettings):
    """The reference model, which exists when algorithm.kl.coef is above 0."""

    parallel: ParallelSettings | None = setting(None, "How one copy of the model is cut; null: like the actor.")
    max_tokens_per_microbatch: int | None = setting(
        None, "Tokens of one forward pass per rank; null: the actor's.", ge=1, le=_MANY, elsewhere=_TOKENS
    )
    logprob_chunk_tokens: int = setting(1024, _CHUNK_TOKENS, ge=0, le=_MANY, elsewhere=_CHUNK_ELSEWHERE)


class RewardModelSettings(RoleSettings):
    """The model that scores samples, which exists when some reward is `model`."""

    path: str | None = setting(
        None,
        "Local Hugging Face directory of a sequence-classification model with one output and the policy's tokenizer. "
        "A sample is worth its output at the last token.",
        min_length=1,
        elsewhere="reward_model_path reward_pretrain rm_path",
    )
    parallel: ParallelSettings | None = setting(None, "How one copy of the model is cut; null: like the actor.")
    max_tokens_per_microbatch: int | None = setting(
        None, "Tokens of one forward pass per rank; null: the actor's.", ge=1, le=_MANY, elsewhere=_TOKENS
    )


class TrainedSettings(RoleSettings):
    """What a model that is trained has besides."""

    recompute: Literal["none", "selective", "full"] = setting(
        "none",
        "Activations that the backward pass computes again: none, those of attention, or all but every layer's input.",
        elsewhere="recompute_granularity activation_checkpointing gradient_checkpointing enable_gradient_checkpointing",
    )
    overlap_grad_reduce: bool = setting(False, "Reduce gradients over replicas while the backward pass still runs.")
    overlap_param_gather: bool = setting(
        False, "Gather updated weights while the next forward pass runs. Needs overlap_grad_reduce."
    )


class ActorSettings(TrainedSettings):
    """The policy that is trained."""

    parallel: ParallelSettings = section(ParallelSettings, "How one copy of the model is cut.")
    optimizer: OptimizerSettings = section(OptimizerSettings, "AdamW and its learning rate.")
    max_tokens_per_microbatch: int = setting(
        4096, "Tokens of one forward pass per rank; sequences are packed up to it.", ge=1, le=_MANY, elsewhere=_TOKENS
    )
    logprob_chunk_tokens: int = setting(1024, _CHUNK_TOKENS, ge=0, le=_MANY, elsewhere=_CHUNK_ELSEWHERE)


class CriticSettings(TrainedSettings):
    """The value model, which exists for ppo."""

    path: str | None = setting(
        None,
        "Local Hugging Face directory of a value or sequence-classification model to start from; "
        "null: the policy's weights and a new head.",
        min_length=1,
        elsewhere="model_name_or_path pretrained pretrain model_path critic_pretrain",
    )
    parallel: ParallelSettings | None = setting(None, "How one copy of the model is cut; null: like the actor.")
    optimizer: CriticOptimizerSettings = section(CriticOptimizerSettings, "AdamW and its learning rate.")
    max_tokens_per_microbatch: int | None = setting(
        None, "Tokens of one forward pass per rank; null: the actor's.", ge=1, le=_MANY, elsewhere=_TOKENS
    )


class WarmupSettings(Section):
    """Supervised steps on the training data's demonstrations, before the algorithm starts."""

    num_steps: int = setting(REQUIRED, "Supervised steps.", ge=1, le=_MANY)
    batch_size: int = setting(64, "Demonstrations per step.", ge=1, le=_MANY)
    optimizer: WarmupOptimizerSettings = section(WarmupOptimizerSettings, "AdamW and its learning rate.")
