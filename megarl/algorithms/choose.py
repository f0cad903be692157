"""The algorithm that a configuration names: a literal dict of built-ins, or a class of the user's."""

from __future__ import annotations

from megarl.algorithms.grpo import Grpo
from megarl.algorithms.ppo import Ppo
from megarl.algorithms.sft import Sft
from megarl.config.algorithms import CustomAlgorithm, GrpoSettings, PpoSettings, SftSettings
from megarl.core.errors import ConfigError
from megarl.core.importing import import_callable
from megarl.core.protocols import Algorithm

# value_loss is for algorithms with a critic, and only ppo has one.
_VERBS = ("credit_groups", "credit_tokens", "policy_loss", "num_epochs")


def build_algorithm(settings: GrpoSettings | PpoSettings | SftSettings | CustomAlgorithm) -> Algorithm:
    """The algorithm of these settings. A class by import path gets its options as keyword arguments."""
    if isinstance(settings, GrpoSettings):
        return Grpo(settings)
    if isinstance(settings, PpoSettings):
        return Ppo(settings)
    if isinstance(settings, SftSettings):
        return Sft()
    made = import_callable(settings.name, "algorithm.name")
    try:
        algorithm: Algorithm = made(**settings.options)
    except Exception as error:  # a user's class may fail in any way
        raise ConfigError(
            "MRL-1304", f"algorithm.name={settings.name!r} cannot be built: {type(error).__name__}: {error}."
        ) from error
    missing = [verb for verb in _VERBS if not hasattr(algorithm, verb)]
    if missing:
        raise ConfigError(
            "MRL-1305", f"algorithm.name={settings.name!r} is no algorithm: it has no {', '.join(missing)}."
        )
    return algorithm
