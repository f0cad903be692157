"""Are the samples any good? H15 to H21 and H24: lengths, filters, ratios, variance, evaluation, staleness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from megarl.metrics.health.alert import Severity
from megarl.metrics.health.rule import FINE, Finding, Rule, above, number
from megarl.metrics.health.seen import Seen
from megarl.metrics.health.windows import Early


class H15ResponsesAreCut(Rule):
    """Many responses end at the length limit, or clearly more than at first."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._first = Early(1, 10)

    def judge(self, seen: Seen) -> Finding | None:
        share = seen.get("response_length/clip_ratio")
        if share is None:
            return None
        self._first.push(share)
        found = above("response_length/clip_ratio", share, self.limits)
        first = self._first.mean
        if found.level or first is None or share <= max(self.limits["growth"] * first, self.limits["floor"]):
            return found
        times = f"above {number(self.limits['growth'])} times its first 10 steps' {number(first)}"
        return Finding(Severity.WARN, f"response_length/clip_ratio is {number(share)}, {times}")


class H16Aborted(Rule):
    """Generations came back empty or were given up."""

    def judge(self, seen: Seen) -> Finding | None:
        share = seen.get("response/aborted_ratio")
        return None if share is None else above("response/aborted_ratio", share, self.limits)


class H17RewardsAreClipped(Rule):
    """Many rewards are outside the range that they are clipped to."""

    def judge(self, seen: Seen) -> Finding | None:
        share = seen.get("critic/reward_clip_frac")
        return None if share is None else above("critic/reward_clip_frac", share, self.limits)


class H18MostAreFiltered(Rule):
    """Few samples are left to train on."""

    def judge(self, seen: Seen) -> Finding | None:
        share = seen.get("actor/valid_sample_ratio")
        if share is None or share >= self.limits["warn"]:
            return None if share is None else FINE
        text = f"actor/valid_sample_ratio is {number(share)}, below {number(self.limits['warn'])}"
        return Finding(Severity.WARN, text)


class H19ExtremeRatios(Rule):
    """A token is far likelier in training than it was when it was sampled."""

    def judge(self, seen: Seen) -> Finding | None:
        ratio = seen.get("actor/ratio_max")
        return None if ratio is None else above("actor/ratio_max", ratio, self.limits)


class H20NoVariance(Rule):
    """All samples of the step score alike. Only where groups are compared within: a critic judges each sample alone."""

    def judge(self, seen: Seen) -> Finding | None:
        found = seen.all("critic/score/max", "critic/score/min", "rollout/zero_variance_group_ratio")
        if found is None or seen.get("critic/values/mean") is not None:
            return None
        highest, lowest, _ = found
        if highest != lowest:
            return FINE
        return Finding(Severity.WARN, f"critic/score/max and critic/score/min are both {number(highest)}")


class H21EvaluationRegressed(Rule):
    """An evaluation fell further below its best than the choice of its prompts explains."""

    per_stage: ClassVar[bool] = False

    def __init__(self, limits: Mapping[str, float]) -> None:
        super().__init__(limits)
        self._best: dict[str, float] = {}

    def judge(self, seen: Seen) -> Finding | None:
        found = []
        for name in seen.names.evals:
            pair = seen.all(name, name.replace("/mean@", "/stderr@"))
            if pair is not None:
                found.append(self._judge_one(name, *pair))
        return max(found, default=None)

    def _judge_one(self, name: str, value: float, error: float) -> Finding:
        best = self._best[name] = max(self._best.get(name, value), value)
        if best - value <= max(self.limits["warn"] * error, self.limits["floor"]):
            return FINE
        text = f"{name} is {number(value)}, further than {number(self.limits['warn'])} standard errors"
        return Finding(Severity.WARN, f"{text} of {number(error)} below its best {number(best)}")


class H24StaleSamples(Rule):
    """Samples come from older weights than those of the step before, or than the run allows."""

    facts: ClassVar[tuple[str, ...]] = ("max_staleness",)

    def judge(self, seen: Seen) -> Finding | None:
        found = seen.all("training/global_step", "sample/model_version/mean")
        if found is None:
            return None
        step, version = found
        limit = self.limits["warn"] + self.limits["max_staleness"]
        if step - version <= limit:
            return FINE
        text = f"sample/model_version/mean is {number(version)}, {number(step - version)} behind training/global_step"
        return Finding(Severity.WARN, f"{text}, above {number(limit)}")
