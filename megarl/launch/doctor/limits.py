"""What this process may use of its machine: limits of the kernel's control groups, and the cores it is bound to.

Limits hold for everything below the group that has them, so a process obeys those of its own group and of all groups
above it. Slurm and systemd set them far below the root, containers at it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
# Version 1 says "no limit" with a number near 2**63.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The smallest limit, and the least that a group of this process has left."""

    limit_bytes: int
    free_bytes: int


def memory_limit(root: Path = _ROOT) -> MemoryLimit | None:
    """None: no group limits it. ``root`` has ``proc/self/cgroup`` and ``sys/fs/cgroup``."""
    found = []
    for group, is_unified in _groups(root, "memory"):
        names = ("max", "current") if is_unified else ("limit_in_bytes", "usage_in_bytes")
        limit, used = (_number(group / f"memory.{name}") for name in names)
        if limit is not None and limit < _NO_LIMIT:
            # files that were read stay in memory, and leave it as soon as somebody needs it
            cached = _statistic(group / "memory.stat", "inactive_file" if is_unified else "total_inactive_file")
            found.append(MemoryLimit(limit, max(0, limit - max(0, (used or 0) - cached))))
    if not found:
        return None
    return MemoryLimit(min(one.limit_bytes for one in found), min(one.free_bytes for one in found))


def core_limit(root: Path = _ROOT) -> float:
    """How many cores' time the groups of this process may use; infinite without a quota."""
    quotas = [math.inf]
    for group, is_unified in _groups(root, "cpu"):
        if is_unified:
            words = (_text(group / "cpu.max") or "").split()
        else:
            words = [_text(group / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas)


def num_usable_cores(root: Path = _ROOT) -> int:
    """The cores that this process is bound to, or fewer if its groups may use less of their time; at least one."""
    bound = len(os.sched_getaffinity(0))
    return max(1, math.floor(min(float(bound), core_limit(root))))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, bool]]:
    """The groups of this process that limit this, from its own to the root; whether each is of version 2."""
    mount = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = (*line.split(":", 2), "", "")[:3]
        if number == "0" and controllers == "":
            tops, is_unified = (mount, mount / "unified"), True
        elif controller in controllers.split(","):
            tops, is_unified = (mount / controllers, mount / controller), False
        else:
            continue
        # A container may show the path as its host sees it, or one that leads out of it: what is not there is no limit.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        top = next((top for top in dict.fromkeys(tops) if top.is_dir()), mount)
        for depth in range(len(parts), -1, -1):
            yield top.joinpath(*parts[:depth]), is_unified


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text is not None and text.isdecimal() else None


def _statistic(path: Path, name: str) -> int:
    for line in (_text(path) or "").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.isdecimal():
            return int(value)
    return 0
