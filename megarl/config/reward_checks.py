"""What only all rewards together can show: options that a built-in one does not take, labels that are given twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megarl.config.problems import KeyPath, Problem, dotted, show
from megarl.config.reward_option_checks import check_options
from megarl.config.rewards import RewardSettings
from megarl.config.schema import RunConfig


def check_rewards(config: RunConfig) -> Iterator[Problem]:
    """The problems of the run's rewards and of those of its evaluation sets."""
    yield from _check(config.reward, ("reward",))
    sections = {"eval": "sets", "bench": "bench_sets"}
    for kind, name, own in config.eval_sets:
        if own.reward is not None:
            yield from _check(own.reward, ("eval", sections[kind], name, "reward"))


def _check(rewards: Sequence[RewardSettings], path: KeyPath) -> Iterator[Problem]:
    labels: dict[str, KeyPath] = {}
    for i, reward in enumerate(rewards):
        # of a single one the user may have written a mapping, or a list: the first path that is there is shown
        paths = ((*path, str(i)), path) if len(rewards) == 1 else ((*path, str(i)),)
        yield from check_options(reward.name, reward.options, paths)
        label = reward.shown_label
        if label in labels:
            text = f"{dotted(paths[0])} is logged as {show(label)}, like {dotted(labels[label])}."
            hint = "Give each reward a label of its own: {name: ..., label: ...}"
            yield Problem("MRL-1460", text, (paths[0], labels[label]), (hint,))
        labels.setdefault(label, paths[0])
