"""A worker's guard as a child process: its pipes, its directory, and how little it knows of our environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import megarl
from megarl.rewards.guard import Terms

# What a worker may know of the driver's environment. Everything else, and so every secret, is withheld.
_ALLOWED = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
_FIXED = {
    # one core per worker
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # sets of text come in the same order every time
    "PYTHONHASHSEED": "0",
}
STDERR = ".stderr"


@dataclass(frozen=True, slots=True)
class Started:
    """The process and our ends of its pipes. It removes its directory, ``scratch``, unless it is killed."""

    process: subprocess.Popen[bytes]
    requests: int
    replies: int
    scratch: str

    def last_words(self) -> str:
        """What the guard itself said, which it only does if it cannot start."""
        try:
            lines = Path(self.scratch, STDERR).read_text(encoding="utf-8", errors="replace").split("\n")
        except OSError:
            return ""
        return next((line[:200] for line in reversed(lines) if line.strip()), "")


def start_worker(
    program: Literal["worker", "relayed"], memory_bytes: int, log: str, variables: Mapping[str, str] | None = None
) -> Started:
    """``python -m megarl.rewards.PROGRAM``. The kernel ties it to the thread that calls this: it ends with it."""
    scratch = tempfile.mkdtemp(prefix="megarl-reward-")
    theirs, requests = os.pipe()
    replies, their_replies = os.pipe()
    terms = Terms(os.getpid(), theirs, their_replies, memory_bytes, log)
    try:
        with open(os.path.join(scratch, STDERR), "wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-m", f"megarl.rewards.{program}", json.dumps(asdict(terms))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=(theirs, their_replies),
                start_new_session=True,
                env={**environment(scratch), **(variables or {})},
                cwd=scratch,
            )
    except OSError:
        os.close(requests)
        os.close(replies)
        raise
    finally:
        os.close(theirs)
        os.close(their_replies)
    return Started(process, requests, replies, scratch)


def environment(scratch: str) -> dict[str, str]:
    """The environment of a worker: a short list of what is harmless, so that no secret is in it."""
    known = {name: os.environ[name] for name in _ALLOWED if name in os.environ}
    root = str(Path(megarl.__file__).parents[1])
    known["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [known.get("PYTHONPATH")])])
    return {**known, **_FIXED, "TMPDIR": scratch}
