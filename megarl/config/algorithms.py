"""Settings of the algorithms: one section, whose ``name`` decides which settings it has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag

from megarl.config.names import AlgorithmPath
from megarl.config.section import REQUIRED, Section, section, setting

LossAggregation = Literal["token-mean", "sequence-mean-token-sum", "sequence-mean-token-mean"]


class KlSettings(Section):
    """How far the policy may drift from the reference model."""

    coef: float = setting(
        0.0,
        "Weight of the KL term. Above 0 the run holds a reference model: the weights it started from.",
        ge=0,
        le=100,
        elsewhere="kl_coef kl_loss_coef init_kl_coef beta",
    )
    estimator: Literal["k1", "k2", "k3"] = setting(
        "k3",
        "Estimator of the per-token KL: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r.",
        elsewhere="kl_type kl_loss_type kl_penalty",
    )
    apply_to: Literal["loss", "reward"] = setting("loss", "Add the KL to the loss, or subtract it from rewards.")


class SftTermSettings(Section):
    """A supervised term of the policy's loss, over the samples themselves."""

    coef: float = setting(0.0, "Weight of the term in the loss; 0: there is none.", ge=0, le=100, elsewhere="sft_coef")
    positive_weight: float = setting(
        1.0,
        "Weight of the negative log-likelihood of samples with a score above 0.",
        ge=0,
        le=100,
        elsewhere="positive_loss_coef",
    )
    negative_weight: float = setting(0.0, "The same for the other samples.", ge=0, le=100)


class CorrectionSettings(Section):
    """Importance sampling against the engine: tokens are drawn with its probabilities, not with the trainer's."""

    kind: Literal["none", "truncate", "mask"] = setting(
        "none",
        "Multiply a token's policy loss with r = its probability by the trainer before the update / by the engine. "
        "truncate: at most high; mask: 0 outside low to high; none: not at all.",
        elsewhere="use_tis tis rollout_is rollout_rs vllm_importance_sampling_correction",
    )
    level: Literal["token", "sequence"] = setting(
        "token",
        "r of each token, or the product of r over a sequence's tokens.",
        elsewhere="rollout_is_level rollout_is_aggregate",
    )
    high: float = setting(
        2.0,
        "Largest r.",
        ge=1,
        le=1e6,
        elsewhere="tis_imp_ratio_cap rollout_is_threshold tis_clip vllm_importance_sampling_cap",
    )
    low: float = setting(
        0.5,
        "Smallest r of mask; truncate has none.",
        ge=0,
        le=1,
        elsewhere="tis_clip_low rollout_is_threshold_lower",
    )


class PolicyLossSettings(Section):
    """The clipped policy loss that GRPO and PPO share."""

    name: str = setting(REQUIRED, "The algorithm.")
    clip_low: float = setting(
        0.2,
        "The probability ratio is clipped below at 1 - clip_low.",
        gt=0,
        le=1,
        elsewhere="cliprange clip_range clip_eps",
    )
    clip_high: float = setting(
        0.2, "The probability ratio is clipped above at 1 + clip_high.", gt=0, le=100, elsewhere="eps_clip_high"
    )
    dual_clip: float | None = setting(
        None, "Bounds the loss of tokens with a negative advantage at this many times it; null: off.", gt=1, le=1000
    )
    entropy_coef: float = setting(
        0.0, "Weight of the entropy bonus.", ge=0, le=10, elsewhere="entropy_coeff entropy_loss_coef"
    )
    loss_aggregation: LossAggregation = setting(
        "token-mean", "How token losses become one number.", elsewhere="loss_agg_mode loss_type"
    )
    kl: KlSettings = section(KlSettings, "How far the policy may drift from the reference model.")
    sft: SftTermSettings = section(SftTermSettings, "A supervised term of the loss, over the samples themselves.")
    correction: CorrectionSettings = section(CorrectionSettings, "Importance sampling against the engine.")
    normalize_rewards: Literal["none", "group", "batch", "running"] = setting(
        "none",
        "Shift and scale rewards to mean 0 and deviation 1 over their group, over the step (batch), or over all that "
        "the run has trained on so far (running).",
        elsewhere="reward_normalization reward_norm norm_mean_type running_mean use_reward_scaling",
    )
    reward_clip: float | None = setting(
        None, "Rewards, normalised, are cut off at plus and minus this; null: off.", gt=0, le=1e6
    )
    weight_samples_by: list[Literal["difficulty", "length"]] = setting(
        [],
        "Samples count more in the policy's loss when their prompt is hard (most of its samples score 0 or less), or "
        "when they are short.",
        rule="a list of difficulty and length; it may be empty",
        elsewhere="difficulty_loss_weight length_loss_weight",
    )
    num_minibatches: int = setting(
        1, "Optimizer steps per pass over a step's samples.", ge=1, le=1_000_000, elsewhere="mini_batch_size"
    )
    num_epochs: int = setting(
        1, "Passes over a step's samples.", ge=1, le=1000, elsewhere="ppo_epochs num_train_epochs"
    )


class GrpoSettings(PolicyLossSettings):
    """Group-relative policy optimization: a sample's advantage is its reward relative to its group."""

    name: Literal["grpo"] = setting(REQUIRED, "The algorithm.")
    normalize_by_std: bool = setting(
        True, "Divide advantages by the group's standard deviation.", elsewhere="norm_adv_by_std_in_grpo scale_rewards"
    )


class PpoSettings(PolicyLossSettings):
    """Proximal policy optimization with a learned critic."""

    name: Literal["ppo"] = setting(REQUIRED, "The algorithm.")
    gamma: float = setting(1.0, "Discount per token.", ge=0, le=1, elsewhere="discount")
    gae_lambda: float = setting(
        0.95, "Lambda of generalized advantage estimation.", ge=0, le=1, elsewhere="lam lambda lambd gae_lambd"
    )
    value_clip: float | None = setting(
        None,
        "A new value may differ from the old by this much in the critic's loss; null: off.",
        gt=0,
        le=1e6,
        elsewhere="cliprange_value value_clip_range",
    )
    whiten_advantages: bool = setting(
        True, "Shift and scale the step's advantages to mean 0 and deviation 1.", elsewhere="whiten_rewards"
    )
    critic_warmup_steps: int = setting(
        0, "First steps that train only the critic.", ge=0, le=1_000_000_000, elsewhere="critic_warmup"
    )


class SftSettings(Section):
    """Supervised fine-tuning on the training data's demonstrations."""

    name: Literal["sft"] = setting(REQUIRED, "The algorithm.")
    batch_size: int = setting(64, "Demonstrations per step.", ge=1, le=1_000_000_000, elsewhere="global_batch_size")
    loss_aggregation: LossAggregation = setting("token-mean", "How token losses become one number.")
    num_minibatches: int = setting(1, "Optimizer steps per step.", ge=1, le=1_000_000)


class CustomAlgorithm(Section):
    """A class of the user's, by import path."""

    name: AlgorithmPath = setting(
        REQUIRED, "The algorithm.", rule='grpo, ppo, sft, or the import path of a class: "package.module:Class"'
    )
    options: dict[str, Any] = setting({}, "Keyword arguments of the class. Only for an algorithm by import path.")


def kind_of_algorithm(value: Any) -> str | None:
    """The tag of the union: the name, or ``custom`` for an import path. None if there is no usable name."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str):
        return None
    return "custom" if ":" in name else name


AlgorithmSettings = Annotated[
    Annotated[GrpoSettings, Tag("grpo")]
    | Annotated[PpoSettings, Tag("ppo")]
    | Annotated[SftSettings, Tag("sft")]
    | Annotated[CustomAlgorithm, Tag("custom")],
    Discriminator(kind_of_algorithm),
]
