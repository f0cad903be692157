"""Speeds and ratios that the driver computes from other metrics of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from megarl.metrics.flops import Arithmetic

# Phases whose work grows with all tokens of the batch. Several epochs lengthen the time but do not multiply the tokens.
_PHASES_OVER_ALL_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
# Sums of wall times under one name, as ROLL and Trinity-RFT tell them; of those parts that a step has.
_SUMS = {
    "time/ref_log_probs_values_reward": ("timing_s/ref", "timing_s/reward"),
    "time/old_log_probs_values": ("timing_s/old_log_prob", "timing_s/values"),
    "time/train_step": ("timing_s/update_actor", "timing_s/update_critic"),
    "time/sync_weight": ("timing_s/update_weights",),
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the step ran on. ``peak_flops`` is of all devices together, in operations per second; None: unknown."""

    num_devices: int = 1
    peak_flops: float | None = None


@dataclass(frozen=True, slots=True)
class Workload:
    """The models' arithmetic."""

    actor: Arithmetic | None = None
    critic: Arithmetic | None = None


@dataclass(frozen=True, slots=True)
class Derivation:
    """Computes what follows from a step's metrics; what lacks an ingredient is left out."""

    hardware: Hardware = field(default_factory=Hardware)
    workload: Workload = field(default_factory=Workload)

    def derive(self, metrics: Mapping[str, float], num_epochs: int = 1) -> dict[str, float]:
        """All that follows from the metrics of a step whose updates went over the batch ``num_epochs`` times."""
        return {
            **_speeds(metrics, self.hardware.num_devices),
            **_sums(metrics),
            **_ratios(metrics),
            **self._utilisation(metrics, num_epochs),
        }

    def _utilisation(self, metrics: Mapping[str, float], num_epochs: int) -> dict[str, float]:
        """Arithmetic done / arithmetic that all devices could have done while the slowest rank was at work."""
        peak = self.hardware.peak_flops
        tokens, squares = metrics.get("perf/total_num_tokens"), metrics.get("perf/num_squared_tokens")
        if peak is None or not tokens or squares is None:
            return {}
        jobs = {
            "actor": (self.workload.actor, "actor_train/train_step", 3 * num_epochs),
            "critic": (self.workload.critic, "critic/train_step", 3 * num_epochs),
            "actor_infer": (self.workload.actor, "actor_train/compute_log_probs", 1),
        }
        return {
            f"perf/mfu/{name}": passes * arithmetic.forward(tokens, squares) / (seconds * peak)
            for name, (arithmetic, phase, passes) in jobs.items()
            if arithmetic is not None and (seconds := metrics.get(f"time/{phase}/execute", 0.0)) > 0
        }


def _speeds(metrics: Mapping[str, float], num_devices: int) -> dict[str, float]:
    derived: dict[str, float] = {}
    num_tokens = metrics.get("perf/total_num_tokens", 0)
    step_seconds = metrics.get("timing_s/step")
    if step_seconds is not None:
        derived["perf/time_per_step"] = step_seconds
        if step_seconds > 0:
            derived["perf/throughput"] = num_tokens / (step_seconds * num_devices)
    tokens_of_phase = {"gen": metrics.get("perf/num_response_tokens", 0)} | dict.fromkeys(
        _PHASES_OVER_ALL_TOKENS, num_tokens
    )
    for phase, tokens in tokens_of_phase.items():
        if tokens > 0 and f"timing_s/{phase}" in metrics:
            derived[f"timing_per_token_ms/{phase}"] = 1000.0 * metrics[f"timing_s/{phase}"] / tokens
    return derived


def _sums(metrics: Mapping[str, float]) -> dict[str, float]:
    present = {name: [metrics[part] for part in parts if part in metrics] for name, parts in _SUMS.items()}
    return {name: sum(parts) for name, parts in present.items() if parts}


def _ratios(metrics: Mapping[str, float]) -> dict[str, float]:
    derived: dict[str, float] = {}
    if "critic/returns/var" in metrics and "critic/value_errors/var" in metrics:
        # The constant keeps a batch of equal returns (every answer right) from dividing by zero.
        explained = 1.0 - metrics["critic/value_errors/var"] / (metrics["critic/returns/var"] + 1e-5)
        derived["critic/vf_explained_var"] = explained
    if metrics.get("actor/total_samples", 0) > 0:
        derived["actor/valid_sample_ratio"] = metrics["actor/valid_samples"] / metrics["actor/total_samples"]
    return derived


class TokenRate:
    """Tokens per wall second of the whole run over the last five completed steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=5)

    def push(self, num_tokens: float, wall_seconds: float) -> float | None:
        """Take a completed step in and return the rate; None while no time has passed."""
        self._steps.append((num_tokens, wall_seconds))
        seconds = sum(step[1] for step in self._steps)
        return sum(step[0] for step in self._steps) / seconds if seconds > 0 else None
