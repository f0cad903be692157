"""All rules over all steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from megarl.config.alerts import AlertSettings
from megarl.config.health_rules import HEALTH_RULES
from megarl.metrics.health import learning, mismatch, resources, samples
from megarl.metrics.health.alert import Alert, Severity
from megarl.metrics.health.rule import Rule, Watch
from megarl.metrics.health.seen import Names, Seen, find_names

RULES: Mapping[str, type[Rule]] = {
    kind.__name__[:3]: kind
    for module in (learning, samples, resources, mismatch)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Rule) and kind is not Rule
}
# Steps have few different sets of names: with and without an evaluation, a checkpoint, an update of the actor.
_MAX_NAME_SETS = 16


class Health:
    """Checks every step of a run, in order.

    What it knows follows from the steps it was given and nothing else: given the records of a ledger it is where the
    run that wrote them was, and goes on with the same alerts.
    """

    def __init__(
        self, settings: AlertSettings, allocator_figures: bool = False, max_staleness: int = 0, is_sparse: bool = False
    ) -> None:
        """``allocator_figures``: memory is read from a device's allocator. On CPU it is the process's resident set,
        which never goes to 0, so that nothing can be said about states left on a device (H26). ``max_staleness``: what
        ``rollout.max_staleness`` allows (H24). ``is_sparse``: the policy is a mixture of experts (H27).
        """
        self._fatal = frozenset(settings.fatal)
        facts = {"max_staleness": float(max_staleness), "is_sparse": float(is_sparse)}
        self._watches = {
            rule: Watch(RULES[rule], spec, settings.rules.get(rule, {}), rule in self._fatal, facts)
            for rule, spec in HEALTH_RULES.items()
            if settings.enabled
            and settings.rules.get(rule, {}).get("enabled", True)
            and (allocator_figures or rule != "H26")
        }
        self._stage = 0
        self._names: dict[tuple[str, ...], Names] = {}
        # level of every rule that the last step says something about, 0 for fine, as metrics
        self.levels: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """Take in a step and return the alerts to raise now, in the order of the rules."""
        stage = _stage_of(metrics)
        if stage > self._stage:
            self._stage = stage
            for watch in self._watches.values():
                watch.enter_stage()
        self.levels = {}
        alerts = []
        seen = Seen(metrics, self._names_in(metrics))
        for rule, watch in self._watches.items():
            level, alert = watch.check(step, seen)
            if level is not None:
                self.levels[f"alerts/{rule}"] = level
            if alert is not None:
                alerts.append(alert)
        return alerts

    def fatal(self, alerts: Iterable[Alert]) -> Alert | None:
        """The first alert that is to stop the run."""
        stopping = (alert for alert in alerts if alert.rule in self._fatal and alert.severity >= Severity.WARN)
        return next(stopping, None)

    def _names_in(self, metrics: Mapping[str, float]) -> Names:
        key = tuple(metrics)
        names = self._names.get(key)
        if names is None:
            if len(self._names) >= _MAX_NAME_SETS:
                self._names.clear()
            names = self._names[key] = find_names(key)
        return names


def _stage_of(metrics: Mapping[str, float]) -> int:
    """0 while there are no scores (demonstrations), 1 while only the critic learns from them, 2 with the policy.

    A run only moves up. That a single step lacks an update or its scores is not a new stage.
    """
    if "critic/score/mean" not in metrics:
        return 0
    return 2 if "timing_s/update_actor" in metrics else 1
