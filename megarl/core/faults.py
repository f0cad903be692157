"""Named places where a test can make a rank die or fail. They do nothing unless ``MEGARL_FAULT`` is set.

``MEGARL_FAULT=point[:rank[:step]]=action``: at that point (on that rank, in that step) ``kill`` ends the process with
SIGKILL, ``raise`` raises a RuntimeError, ``enospc`` raises what a full disk raises. Only tests set the variable.
"""

from __future__ import annotations

import errno
import os
import signal

VARIABLE = "MEGARL_FAULT"
# Every point, in the order in which a run reaches it; tests walk this list.
POINTS = (
    "step/rollout",
    "step/annotate",
    "step/update",
    "step/record",
    "step/end",
    "save/snapshot",
    "save/staged",
    "save/file-half-written",
    "save/file-written",
    "save/file-synced",
    "save/before-manifest",
    "save/manifest-written",
    "save/manifest-synced",
    "save/before-rename",
    "save/set-aside",
    "save/after-rename",
    "save/committed",
    "save/removing",
    "save/retained",
)


def reach(point: str, *, rank: int, step: int | None = None) -> None:
    """Say that this rank is at ``point``; the fault that is armed there happens now."""
    armed = os.environ.get(VARIABLE)
    if armed is None:
        return
    place, _, action = armed.rpartition("=")
    wanted_point, wanted_rank, wanted_step = [*place.split(":"), "", ""][:3]
    for name in (point, wanted_point):
        if name not in POINTS:
            raise ValueError(f"{name!r} is not a fault point; there are {', '.join(POINTS)}")
    if point == wanted_point and wanted_rank in ("", str(rank)) and wanted_step in ("", str(step)):
        _happen(action, point)


def _happen(action: str, point: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)
    elif action == "raise":
        raise RuntimeError(f"fault at {point}")
    else:
        raise ValueError(f"{action!r} is not a fault; there are kill, raise and enospc")
