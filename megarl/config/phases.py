"""The phase table: what each phase of a step needs on the device, for one configuration."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config.algorithms import SftSettings
from megarl.config.schema import RunConfig

WEIGHTS = ("weights",)
STATE = ("weights", "optimizer")
TRAINING = ("weights", "grads", "optimizer")
SERVING = ("weights", "kv_cache")
STAYS = "stays"
SCORING = "reward/compute_rewards"
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase by its name in the metrics, and which parts of each model must be on the device in it."""

    name: str
    needs: dict[str, tuple[str, ...]]

    @property
    def parts(self) -> frozenset[str]:
        """The parts by their full names: ``actor.weights``."""
        return frozenset(f"{model}.{part}" for model, parts in self.needs.items() for part in parts)


def phases(config: RunConfig) -> list[Phase]:
    """The phases of a step that move something, in their order; those of models that the run does not have are left
    out, and so is generating by engines that have devices of their own.
    """
    supervised, trains, shares = _is_supervised(config), not config.only_generates, config.engine_shares_devices
    update: dict[str, tuple[str, ...]] = {"actor": WEIGHTS, **({"engine": WEIGHTS} if shares else {})}
    table = [
        (shares, Phase("actor_infer/generate", {"engine": SERVING})),
        (config.uses_reward_model, Phase(SCORING, {"reward_model": WEIGHTS})),
        (config.uses_reference, Phase("reference/compute_log_probs", {"reference": WEIGHTS})),
        (trains and not supervised, Phase("actor_train/compute_log_probs", {"actor": WEIGHTS})),
        (config.uses_critic, Phase("critic/compute_values", {"critic": WEIGHTS})),
        (config.uses_critic, Phase("critic/train_step", {"critic": TRAINING})),
        (trains, Phase("actor_train/train_step", {"actor": TRAINING})),
        (config.generates, Phase("actor_train/model_update", update)),
        (True, Phase("actor_train/do_checkpoint", _saved(config))),
    ]
    return [phase for exists, phase in table if exists]


def measured_phases(config: RunConfig) -> list[str]:
    """The names of all phases that a run measures: those of the table, and those that move nothing."""
    others = [
        (config.generates and not config.engine_shares_devices, "actor_infer/generate"),
        (config.generates and not config.uses_reward_model, SCORING),
        (config.warmup is not None or _is_supervised(config), "data/read_demonstrations"),
    ]
    return [phase.name for phase in phases(config)] + [name for exists, name in others if exists]


def _is_supervised(config: RunConfig) -> bool:
    return isinstance(config.algorithm, SftSettings)


def _saved(config: RunConfig) -> dict[str, tuple[str, ...]]:
    """All models are saved at one moment. Weights that the engine serves stay: they would have to be sent again."""
    needs = {"engine": WEIGHTS, "actor": STATE, "critic": STATE, "reference": WEIGHTS}
    return {model: parts for model, parts in needs.items() if model in residents(config)}


def residents(config: RunConfig) -> list[str]:
    """The models that share the device, in the order of the table's columns."""
    exists = {
        "engine": config.engine_shares_devices,
        "actor": True,
        "critic": config.uses_critic,
        "reference": config.uses_reference,
        "reward_model": config.uses_reward_model,
    }
    return [name for name, present in exists.items() if present]


def on_device(config: RunConfig, phase: Phase, model: str) -> str:
    """What ``model`` has on the device in ``phase``. A model that is never offloaded stays."""
    if model in phase.needs:
        return ", ".join(phase.needs[model])
    return ABSENT if leaves_device(config, model) else STAYS


def leaves_device(config: RunConfig, model: str) -> bool:
    """Whether the model is offloaded in phases that do not need it. The engine makes room for an actor that does."""
    offload = {
        "engine": config.actor.offload,
        "actor": config.actor.offload,
        "critic": config.critic.offload,
        "reference": config.reference.offload,
        "reward_model": config.reward_model.offload,
    }
    return offload[model]
