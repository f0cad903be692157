"""Which groups, and which of their samples, are worth training on.

Filters see scored groups, one at a time and in the order of `rollout.filters`; what one drops the next never sees. They
run in the driver's process, between scoring and learning, and must depend on the group alone: a run that resumes asks
them again about the same groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from megarl.config.filters import FilterSettings
from megarl.core.blame import describe_failure
from megarl.core.errors import ConfigError, DataError
from megarl.core.excerpt import excerpt
from megarl.core.importing import import_callable
from megarl.core.protocols import Statistics
from megarl.core.sample import Group, Sample
from megarl.metrics.meter import Meter

# gives what is left of a group; None: nothing
GroupFilter = Callable[[Group], Group | None]


class ZeroVariance:
    """Drops groups whose rewards are all equal: compared with each other, their samples teach nothing (DAPO)."""

    def __call__(self, group: Group) -> Group | None:
        rewards = [sample.reward for sample in group.samples]
        return group if any(reward != rewards[0] for reward in rewards) else None


class Length:
    """Drops samples that were cut at the length limit, or have more than ``max_tokens``: their rewards say little.

    The others are compared with each other alone. A group of which fewer than two are left is dropped as well, unless
    it had only one. With ``drop`` "group" one such sample is enough to drop its group.
    """

    def __init__(self, max_tokens: int | None = None, drop: Literal["samples", "group"] = "samples") -> None:
        self._max_tokens = max_tokens
        self._drops_group = drop == "group"

    def __call__(self, group: Group) -> Group | None:
        left = [sample for sample in group.samples if not self._is_too_long(sample)]
        if len(left) == len(group.samples):
            return group
        return None if self._drops_group or len(left) < 2 else Group(group.prompt, left)

    def _is_too_long(self, sample: Sample) -> bool:
        limit = self._max_tokens
        return sample.finish == "length" or (limit is not None and sample.num_response_tokens > limit)


class RewardRange:
    """Drops groups whose mean reward is outside ``low`` to ``high``: prompts that are too hard or too easy by now."""

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        self._low = -np.inf if low is None else low
        self._high = np.inf if high is None else high

    def __call__(self, group: Group) -> Group | None:
        mean = float(np.mean([sample.reward for sample in group.samples if sample.reward is not None]))
        return group if self._low <= mean <= self._high else None


class Keep:
    """A function of the user's, ``keep(group) -> bool``. A mistake in it ends the run: it decides what is learned."""

    def __init__(self, name: str, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._name = name
        self._function = function
        self._options = options

    def __call__(self, group: Group) -> Group | None:
        try:
            keeps = self._function(group, **self._options)
        except (Exception, SystemExit) as error:
            raise DataError(
                "MRL-2410",
                f'filter "{self._name}" raised {describe_failure(error, self._function)} '
                f"for prompt {excerpt(group.prompt.id)}.",
            ) from error
        if not isinstance(keeps, (bool, np.bool_)):
            raise DataError(
                "MRL-2411",
                f'filter "{self._name}" returned {type(keeps).__name__} for prompt {excerpt(group.prompt.id)}.\n'
                "Expected True (keep the group) or False (drop it).",
            )
        return group if keeps else None


_BUILTINS: dict[str, Callable[..., GroupFilter]] = {
    "zero_variance": ZeroVariance,
    "length": Length,
    "reward_range": RewardRange,
}


class Filters:
    """The filters of a run. Of the driver; other ranks have no groups."""

    class _Named(NamedTuple):
        label: str
        keep: GroupFilter

    def __init__(self, settings: Sequence[FilterSettings] = ()) -> None:
        """Find them all, and check that they can be called; nothing is called yet."""
        self._filters = [self._Named(one.label, _load(one)) for one in settings]

    @property
    def is_active(self) -> bool:
        """Whether there is any."""
        return bool(self._filters)

    def apply(self, groups: Sequence[Group], meter: Meter) -> list[Group]:
        """What is left of the groups, in their order."""
        left = list(groups)
        if not self._filters or not groups:
            return left
        with meter.timed("time/experience_pipeline/total"):
            for position, (label, keep) in enumerate(self._filters):
                with meter.timed(f"time/experience_pipeline/operator/{position}_{label}"):
                    before, left = left, [kept for group in left if (kept := keep(group)) is not None]
                _report(label, before, left, meter)
        return left


def _report(label: str, before: Sequence[Group], after: Sequence[Group], meter: Statistics) -> None:
    num_samples = [sum(len(group.samples) for group in groups) for groups in (before, after)]
    meter.sum(f"experience_pipeline/filter/{label}/dropped_groups", len(before) - len(after))
    meter.sum(f"experience_pipeline/filter/{label}/dropped_samples", num_samples[0] - num_samples[1])


def _load(settings: FilterSettings) -> GroupFilter:
    if settings.name in _BUILTINS:
        return _BUILTINS[settings.name](**settings.options)
    function = import_callable(settings.name, "rollout.filters")
    if inspect.iscoroutinefunction(function):
        raise ConfigError("MRL-1510", f'filter "{settings.name}" is async. Filters are plain functions: write def.')
    try:
        inspect.signature(function).bind("group", **settings.options)
    except ValueError:  # some functions written in C do not tell
        pass
    except TypeError as error:
        options = "".join(f", {key}=…" for key in settings.options)
        raise ConfigError(
            "MRL-1510",
            f'filter "{settings.name}" cannot be called: {error}.\nExpected call: keep(group{options}) -> bool.',
        ) from error
    return Keep(settings.name, function, settings.options)
