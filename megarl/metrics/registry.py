"""Looks metrics up by the names that a run emits."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from functools import lru_cache

from megarl.metrics.catalogue import CATALOGUE, Metric
from megarl.metrics.meter import Meter
from megarl.metrics.values import KINDS

USER_PREFIX = "user/"

# What a run may fill in. Task names may contain slashes (openai/gsm8k).
_PLACEHOLDERS = {
    "task": r".+",
    "infix": r"[^/]+/[^/]+",
    "k": r"[0-9]+",
    "score": r"[^/]+",
    "engine": r"[^/]+",
    "filter": r"[^/]+",
    "device": r"[0-9]+",
    "stat": r"[a-z_]+",
    "rule": r"H[0-9]{2}",
}
_ALTERNATIVES = re.compile(r"\{([^{}]*,[^{}]*)\}")


def expand(family: Metric) -> list[Metric]:
    """``critic/score/{mean,max,min}`` as three metrics; alternatives of all fields are taken in parallel."""
    texts = (family.name, family.reduction, family.doc, *family.aliases.values())
    sizes = {len(found.split(",")) for text in texts for found in _ALTERNATIVES.findall(text)}
    if not sizes:
        return [family]
    if len(sizes) > 1:
        raise ValueError(f"{family.name}: alternatives must have one length to expand in parallel, not {sorted(sizes)}")

    def pick(text: str, index: int) -> str:
        return _ALTERNATIVES.sub(lambda found: found[1].split(",")[index], text)

    return [
        replace(
            family,
            name=pick(family.name, index),
            reduction=pick(family.reduction, index),
            doc=pick(family.doc, index),
            aliases={dialect: pick(spelling, index) for dialect, spelling in family.aliases.items()},
        )
        for index in range(sizes.pop())
    ]


METRICS: tuple[Metric, ...] = tuple(metric for family in CATALOGUE for metric in expand(family))


@lru_cache(maxsize=65536)  # devices times phases are many
def find(name: str) -> Metric | None:
    """The metric that ``name`` belongs to, with its name and aliases filled in; None if there is none."""
    exact = _BY_NAME.get(name)
    if exact is not None:
        return exact
    for pattern, template in _TEMPLATES:
        if found := pattern.fullmatch(name):
            filled = found.groupdict()
            aliases = {dialect: _fill(spelling, filled) for dialect, spelling in template.aliases.items()}
            return replace(template, name=name, aliases=aliases)
    return None


def canonical(name: str) -> str:
    """The name itself if it is known, else the name under ``user/``, where names of rewards and plugins live."""
    return name if find(name) or name.startswith(USER_PREFIX) else USER_PREFIX + name


def check(name: str) -> Metric:
    """The metric, or ValueError if the name is not in the catalogue. For tests and strict runs."""
    metric = find(name)
    if metric is None:
        close = difflib.get_close_matches(name, [metric.name for metric in METRICS], n=3)
        hint = f"Close: {', '.join(close)}." if close else "Add an entry to megarl/metrics/catalogue/."
        raise ValueError(f"metric {name!r} is not in the catalogue. {hint}")
    return metric


def check_meter(meter: Meter) -> None:
    """Raise ValueError unless every metric is in the catalogue and was collected with the kind that it documents."""
    reported_as = {"span": "/total", "gauge": "/0"}
    for name, statistic in meter.statistics.items():
        metric = check(name + reported_as.get(statistic.kind, ""))
        if metric.reduction in KINDS and metric.reduction != statistic.kind:
            raise ValueError(f"metric {name!r} is documented as {metric.reduction} but collected as {statistic.kind}")


def _fill(template: str, values: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: values[found[1]], template)


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", template)  # text, placeholder, text, placeholder, ..., text
    regex = "".join(
        f"(?P<{part}>{_PLACEHOLDERS[part]})" if index % 2 else re.escape(part) for index, part in enumerate(parts)
    )
    return re.compile(regex)


_BY_NAME = {metric.name: metric for metric in METRICS if "{" not in metric.name}
_TEMPLATES = [(_pattern(metric.name), metric) for metric in METRICS if "{" in metric.name]
