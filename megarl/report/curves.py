"""Which metrics make which learning curve. A curve is drawn when the run has its first metric."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megarl.metrics.registry import find


@dataclass(frozen=True, slots=True)
class Curve:
    """One chart. Names may have ``*``; ``wide`` ones fill the page's width."""

    title: str
    names: tuple[str, ...]
    wide: bool = False


CURVES = (
    Curve("Score", ("eval/*/score/mean@*", "critic/score/mean"), wide=True),
    Curve("Loss of the demonstrations", ("actor/sft_loss",)),
    Curve("Entropy", ("actor/entropy",)),
    Curve("Distance to the reference", ("actor/kl_loss",)),
    Curve("Distance to the rollout policy", ("actor/ppo_kl",)),
    Curve("Clipped tokens", ("actor/pg_clipfrac",)),
    Curve("Policy loss", ("actor/pg_loss", "actor/total_loss")),
    Curve("Gradient norm of the policy", ("actor/grad_norm",)),
    Curve("Learning rate", ("actor/lr",)),
    Curve("Score, range", ("critic/score/max", "critic/score/min")),
    Curve("Evaluation, range", ("val/score/mean", "val/score/max", "val/score/min")),
    Curve("Groups without a lesson", ("rollout/zero_variance_group_ratio",)),
    Curve("Response length", ("response_length/mean", "response_length/max", "response_length/min")),
    Curve("Responses cut off", ("response_length/clip_ratio",)),
    Curve("Loss of the critic", ("critic/vf_loss",)),
    Curve("Variance explained by the critic", ("critic/vf_explained_var",)),
    Curve("Gradient norm of the critic", ("critic/grad_norm",)),
    Curve("Engine against trainer: largest gap", ("mismatch/logprob_gap_max",)),
    Curve("Engine against trainer: KL", ("mismatch/k3_kl",)),
    Curve("Throughput", ("perf/throughput",)),
    Curve("Model FLOPs utilisation", ("perf/mfu/actor",)),
    Curve("Step time", ("timing_s/step_wall",)),
)


def curves_for(names: Iterable[str]) -> list[dict[str, Any]]:
    """The charts that these metrics allow, each with the names it has."""
    present = list(names)
    charts = []
    for curve in CURVES:
        found = [name for pattern in curve.names for name in present if fnmatch.fnmatchcase(name, pattern)]
        if found:
            charts.append({"title": curve.title, "names": found, "wide": curve.wide})
    return charts


def describe(name: str) -> dict[str, Any] | None:
    """Unit, meaning and other spellings of a metric, as the catalogue has them."""
    metric = find(name)
    if metric is None:
        return None
    spellings = sorted(set(metric.aliases.values()) - {name})
    return {"unit": metric.unit, "doc": metric.doc, "aliases": spellings}
