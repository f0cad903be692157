"""What a check found, and how findings of many ranks become one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megarl.core.errors import MegarlError

Level = Literal["ok", "warning", "error"]
_ORDER: dict[Level, int] = {"ok": 0, "warning": 1, "error": 2}
_NAME_WIDTH, _INDENT = 18, 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, how it is, and what to do if it is not well."""

    name: str
    level: Level
    text: str
    remedy: str = ""

    def to_tree(self) -> dict[str, Any]:
        """JSON values only."""
        return {"name": self.name, "level": self.level, "text": self.text, "remedy": self.remedy}


def as_finding(name: str, error: MegarlError) -> Finding:
    """A mistake that would have ended the run: its first line says what is wrong, the others what to do."""
    first, _, rest = str(error).partition("\n")
    return Finding(name, "error", first, " ".join(rest.split()))


@dataclass(frozen=True, slots=True)
class Merged:
    """The same finding of one or more hosts."""

    finding: Finding
    hosts: tuple[str, ...]


def merge(by_rank: Sequence[tuple[str, Sequence[Finding]]]) -> list[Merged]:
    """(host, findings) of every rank -> each different finding once, with its hosts; in the order of the checks."""
    hosts: dict[Finding, list[str]] = {}
    for host, findings in by_rank:
        for finding in findings:
            known = hosts.setdefault(finding, [])
            if host not in known:
                known.append(host)
    order = list(dict.fromkeys(finding.name for finding in hosts))
    merged = [Merged(finding, tuple(own)) for finding, own in hosts.items()]
    return sorted(merged, key=lambda one: order.index(one.finding.name))


def worst(merged: Sequence[Merged]) -> Level:
    """The most serious level."""
    return max((one.finding.level for one in merged), key=_ORDER.__getitem__, default="ok")


def as_table(merged: Sequence[Merged], num_hosts: int) -> str:
    """For people. Hosts are named where not all of them are alike."""
    lines = []
    for one in merged:
        where = "" if len(one.hosts) == num_hosts else f" [{', '.join(one.hosts)}]"
        lines.append(f"  {one.finding.level:<8} {one.finding.name:<{_NAME_WIDTH}} {one.finding.text}{where}")
        if one.finding.remedy:
            lines.append(f"{'':{_INDENT}}-> {one.finding.remedy}")
    return "\n".join(lines)
