"""Speeds and ratios that the driver computes from other metrics of the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

# Phases whose work grows with all tokens of the batch. Several epochs lengthen the time but do not multiply the tokens.
_PHASES_OVER_ALL_TOKENS = ("old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")


def derive(metrics: Mapping[str, float], num_devices: int) -> dict[str, float]:
    """What follows from ``metrics``; what lacks an ingredient is left out. ``num_devices`` counts all ranks."""
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
    if "critic/returns/var" in metrics and "critic/value_errors/var" in metrics:
        # The constant keeps a batch of equal returns (every answer right) from dividing by zero.
        explained = 1.0 - metrics["critic/value_errors/var"] / (metrics["critic/returns/var"] + 1e-5)
        derived["critic/vf_explained_var"] = explained
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
