"""What only a look at all ranks' reports shows: other software, other settings, or the same GPU on several ranks."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.config.flat import flat_settings
from megarl.config.schema import RunConfig
from megarl.core.step_ranges import step_ranges
from megarl.launch.agreement import own_versions
from megarl.launch.doctor.finding import Finding

_MAX_NAMED = 4
_MAX_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank found by itself, and what must be alike on all of them."""

    # with the node's number where there are several: machines of a test may share a name
    host: str
    findings: list[Finding]
    software: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    # the UUID of the GPU that the rank will use; "" without one
    gpu: str = ""

    @property
    def may_connect(self) -> bool:
        """With a wrong interface gloo would fail, or wait for ever."""
        return not any(one.name == "interface" and one.level == "error" for one in self.findings)

    def to_tree(self) -> dict[str, Any]:
        """JSON values only."""
        return asdict(self)

    @staticmethod
    def from_tree(tree: dict[str, Any]) -> Report:
        """The inverse."""
        return Report(**{**tree, "findings": [Finding(**one) for one in tree["findings"]]})


def own_software() -> dict[str, str]:
    """The versions that must be alike."""
    return {**own_versions(), "Python": platform.python_version()}


def own_settings(config: RunConfig | None) -> dict[str, str]:
    """Empty without a configuration."""
    return {} if config is None else flat_settings(config)


def compare(reports: Mapping[int, Report]) -> list[Finding]:
    """Findings about all ranks that reported."""
    return [
        _alike("software", {rank: one.software for rank, one in reports.items()}, "install the same on all nodes"),
        _alike(
            "settings",
            {rank: one.settings for rank, one in reports.items()},
            "start all ranks with the same configuration file and the same settings behind it",
        ),
        *_shared_gpus(reports),
    ]


def _alike(name: str, tables: Mapping[int, Mapping[str, str]], remedy: str) -> Finding:
    keys = list(dict.fromkeys(key for table in tables.values() for key in table))
    different = []
    for key in keys:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, table in tables.items():
            ranks_by_value.setdefault(table.get(key, "not set"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = ", ".join(f"{_short(value)} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            different.append(f"{key} is {values}")
    if not different:
        # versions are worth telling, two hundred settings are not
        listed = ", ".join(f"{key} {value}" for key, value in next(iter(tables.values())).items())
        what = listed if len(keys) <= _MAX_NAMED else f"{len(keys)} of them"
        return Finding(name, "ok", f"the same on all ranks: {what}" if keys else "no configuration was given")
    more = f"; and {len(different) - _MAX_NAMED} more" if len(different) > _MAX_NAMED else ""
    return Finding(name, "error", "; ".join(different[:_MAX_NAMED]) + more, remedy)


def _short(value: str) -> str:
    return value if len(value) <= _MAX_CHARACTERS else f"{value[:_MAX_CHARACTERS]}..."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {step_ranges(ranks)}"


def _shared_gpus(reports: Mapping[int, Report]) -> list[Finding]:
    ranks_by_gpu: dict[tuple[str, str], list[int]] = {}
    for rank, report in reports.items():
        if report.gpu:
            ranks_by_gpu.setdefault((report.host, report.gpu), []).append(rank)
    return [
        Finding(
            "device",
            "error",
            f"{_ranks(ranks)} share one GPU ({gpu}, {host})",
            "show each rank a GPU of its own: do not set CUDA_VISIBLE_DEVICES to the same device for all of them",
        )
        for (host, gpu), ranks in ranks_by_gpu.items()
        if len(ranks) > 1
    ]
