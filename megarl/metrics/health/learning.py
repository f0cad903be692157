"""Does it learn? H01 to H10: scores, the policy's updates, the critic."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from megarl.metrics.health.alert import Severity
from megarl.metrics.health.rule import FINE, Finding, Rule, above, number
from megarl.metrics.health.seen import Seen
from megarl.metrics.health.windows import Early, Trend, slope

_FLAT_STEPS = 100
_RISING_STEPS = 50
_GRAD_WINDOW, _LEAST_GRADS = 20, 10
SCORE, ENTROPY, KL_LOSS = "critic/score/mean", "actor/entropy", "actor/kl_loss"


class H01ScoreIsFlat(Rule):
    """The score's slope over 100 steps is not above 0."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._scores: deque[float] = deque(maxlen=_FLAT_STEPS)

    def judge(self, seen: Seen) -> Finding | None:
        score = seen.get(SCORE)
        if score is None:
            return None
        self._scores.append(score)
        if len(self._scores) < _FLAT_STEPS or (per_step := slope(self._scores)) > 0:
            return FINE
        text = f"{SCORE} is {number(score)} and changes by {number(per_step * 100)} in 100 steps"
        return Finding(Severity.INFO, text)


class H02ScoreIsZero(Rule):
    """No sample scores."""

    def judge(self, seen: Seen) -> Finding | None:
        scores = seen.all(SCORE, "critic/score/max")
        if scores is None:
            return None
        return FINE if any(scores) else Finding(Severity.WARN, f"{SCORE} and critic/score/max are 0")


def _policy_entropy(seen: Seen) -> float | None:
    """Only of a policy that learns from rewards: imitating demonstrations is meant to lower it."""
    return seen.get(ENTROPY) if seen.get(SCORE) is not None else None


class H03EntropyCollapses(Rule):
    """Entropy is unusual, far below where it began, or nearly gone."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._first = Early(1, 10)

    def judge(self, seen: Seen) -> Finding | None:
        entropy = _policy_entropy(seen)
        if entropy is None:
            return None
        self._first.push(entropy)
        first, limits = self._first.median, self.limits
        if first is not None and first > limits["critical"]:
            if entropy < limits["critical"]:
                return Finding(Severity.CRITICAL, f"{ENTROPY} is {number(entropy)}, below {number(limits['critical'])}")
            if entropy < limits["warn"] * first:
                share = f"below {number(limits['warn'])} of its first 10 steps' {number(first)}"
                return Finding(Severity.WARN, f"{ENTROPY} is {number(entropy)}, {share}")
        if limits["low"] <= entropy <= limits["high"]:
            return FINE
        text = f"{ENTROPY} is {number(entropy)}, outside {number(limits['low'])} to {number(limits['high'])}"
        remark = (
            "that range was seen with one 0.5B model, so watch how it changes. "
            "rollout.temperature and algorithm.entropy_coef move it."
        )
        return Finding(Severity.INFO, text, remark)


class H04EntropyExplodes(Rule):
    """Entropy is far above where it began."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._first = Early(1, 10)

    def judge(self, seen: Seen) -> Finding | None:
        entropy = _policy_entropy(seen)
        if entropy is None:
            return None
        self._first.push(entropy)
        first = self._first.median
        if not first or entropy <= self.limits["warn"] * first:  # from 0 there is only upwards
            return FINE
        times = f"above {number(self.limits['warn'])} times its first 10 steps' {number(first)}"
        return Finding(Severity.WARN, f"{ENTROPY} is {number(entropy)}, {times}")


class H05PolicyJumps(Rule):
    """The policy leaves the one that sampled. Exactly 0 comes from a single update and says nothing."""

    def judge(self, seen: Seen) -> Finding | None:
        kl = seen.get("actor/ppo_kl")
        if not kl:
            return None
        return above("actor/ppo_kl" if kl > 0 else "-actor/ppo_kl", abs(kl), self.limits)


class H06DriftsFromReference(Rule):
    """The distance to the reference is many times the early one, or has only ever grown for 50 steps."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._early = Early(5, 20)
        self._last = math.inf
        self._num_rises = 0

    def judge(self, seen: Seen) -> Finding | None:
        kl = seen.get(KL_LOSS)
        if kl is None:
            return None
        self._early.push(kl)
        self._num_rises = self._num_rises + 1 if kl > self._last else 0
        self._last = kl
        early = self._early.median
        if early is not None and 0 < self.limits["warn"] * early < kl:  # k1 may be below 0, and says nothing then
            times = f"above {number(self.limits['warn'])} times its early {number(early)}"
            return Finding(Severity.WARN, f"{KL_LOSS} is {number(kl)}, {times}")
        if self._num_rises >= _RISING_STEPS:
            return Finding(Severity.WARN, f"{KL_LOSS} is {number(kl)} and rose in each of {self._num_rises} steps")
        return FINE


class H07UpdatesAreSmall(Rule):
    """The policy hardly moves, and the score does not improve."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._score = Trend()

    def judge(self, seen: Seen) -> Finding | None:
        found = seen.all(KL_LOSS, "actor/pg_clipfrac", SCORE)
        if found is None:
            return None
        kl, clipfrac, score = found
        self._score.push(score)
        if kl >= self.limits["kl"] or clipfrac >= self.limits["clipfrac"] or self._score.improves:
            return FINE
        rate = seen.get("actor/lr")
        at = "" if rate is None else f" at actor/lr {number(rate)}"
        return Finding(Severity.INFO, f"{KL_LOSS} is {number(kl)} and actor/pg_clipfrac {number(clipfrac)}{at}")


class H08ManyClipped(Rule):
    """The clip changes the objective of many tokens."""

    def judge(self, seen: Seen) -> Finding | None:
        share = seen.get("actor/pg_clipfrac")
        return None if share is None else above("actor/pg_clipfrac", share, self.limits)


class H09GradientSpike(Rule):
    """A gradient is not finite, or many times the recent ones."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._recent = {role: deque[float](maxlen=_GRAD_WINDOW) for role in ("actor", "critic")}

    def judge(self, seen: Seen) -> Finding | None:
        found = [self._judge_skipped(role, seen.raw.get(f"{role}/skipped_updates", 0)) for role in self._recent]
        found += [
            self._judge_one(role, norm)
            for role in self._recent
            if (norm := seen.raw.get(f"{role}/grad_norm")) is not None
        ]
        return max((one for one in found if one is not None), default=None)

    def _judge_skipped(self, role: str, num_skipped: float) -> Finding | None:
        """An update with a gradient that is not finite is skipped, and has no norm to report."""
        if not num_skipped:
            return None
        text = f"{role}/skipped_updates is {number(num_skipped)}: gradients were not finite"
        return Finding(
            Severity.CRITICAL, text, f"lower {role}.optimizer.lr, and look at the step's rewards and samples."
        )

    def _judge_one(self, role: str, norm: float) -> Finding:
        recent = self._recent[role]
        remark = (
            f"a gradient spike. Lower {role}.optimizer.lr, keep {role}.optimizer.grad_clip on, "
            "and look at the step's samples."
        )
        if not math.isfinite(norm):
            return Finding(Severity.CRITICAL, f"{role}/grad_norm is {norm}", remark)
        usual = median(recent) if len(recent) >= _LEAST_GRADS else math.inf
        recent.append(norm)
        if norm <= max(self.limits["critical"] * usual, self.limits["floor"]):
            return FINE
        times = f"above {number(self.limits['critical'])} times the recent {number(usual)}"
        return Finding(Severity.CRITICAL, f"{role}/grad_norm is {number(norm)}, {times}", remark)


class H10CriticIsOff(Rule):
    """Values are far from returns on average, or explain less of them than a constant would.

    Returns - values is the advantage before whitening, and exists only with a critic.
    """

    def judge(self, seen: Seen) -> Finding | None:
        found = seen.all(
            "critic/returns/mean", "critic/values/mean", "critic/value_errors/var", "critic/vf_explained_var"
        )
        if found is None:
            return None
        returns, values, variance, explained = found
        deviation = math.sqrt(max(variance, 0.0))
        if abs(returns - values) > self.limits["warn"] * deviation:
            text = f"critic/values/mean is {number(values)} where critic/returns/mean is {number(returns)}"
            return Finding(Severity.WARN, f"{text}, more than {number(self.limits['warn'])} deviations apart")
        if explained < self.limits["explained"]:
            text = f"critic/vf_explained_var is {number(explained)}, below {number(self.limits['explained'])}"
            return Finding(Severity.WARN, text)
        return FINE
