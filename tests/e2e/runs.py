"""Real runs of the real command, for tests."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megarl.core.faults import VARIABLE

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"

# A few seconds of training: it learns nothing, but everything happens that happens in a long run.
SHORT = (
    "warmup.num_steps=3",
    "warmup.optimizer.warmup_steps=1",
    "warmup.batch_size=8",
    "run.num_steps=2",
    "rollout.prompts_per_step=4",
    "rollout.group_size=4",
    "rollout.max_new_tokens=12",
    "eval.every=1",
    "eval.sets.held_out.max_prompts=8",
)

# For runs that are interrupted: nothing but steps, each of them saved. `run.num_steps` is the test's own.
INTERRUPTED = (
    *SHORT,
    "warmup=null",
    "eval.every=0",
    "eval.before_training=false",
    "eval.at_end=false",
    "checkpoint.every=1",
)


# Clocks, memory and what is computed from them; everything else must repeat to the last bit.
NOT_REPRODUCIBLE = re.compile(
    r"(rollout/)?time/|timing_|memory/|perf/(throughput|time_per_step|mfu/.*|.*_gb|cpu_memory_used_frac)|system/tps|alerts/(H1[123]|H2[2356])"
)


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    code: int
    stdout: str
    stderr: str
    directory: Path

    @property
    def steps(self) -> list[str]:
        """The ``step:`` lines of the console."""
        return [line for line in self.stdout.splitlines() if line.startswith("step:")]


def command(config: Path, directory: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "megarl", "train", str(config), f"run.dir={directory}", *overrides]


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without anything that a launcher, or another test, may have put into it."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    kept = {key: value for key, value in os.environ.items() if key not in foreign}
    return kept | {"PYTHONPATH": str(ROOT)} | extra


def train(
    config: Path,
    directory: Path,
    *overrides: str,
    cwd: Path | None = None,
    fault: str | None = None,
    timeout_seconds: float = 300.0,
) -> Outcome:
    """Run to the end and check that no process is left. ``fault`` is one of `core.faults`."""
    result = subprocess.run(
        command(config, directory, *overrides),
        capture_output=True,
        text=True,
        cwd=cwd or directory,
        env=environment(**({VARIABLE: fault} if fault else {})),
        timeout=timeout_seconds,
        check=False,
    )
    assert ranks_of(directory) == [], "a rank outlived the command"
    own_name = config.stem if config.parent == QUICKSTART.parent else "quickstart"
    name = next((o.partition("=")[2] for o in overrides if o.startswith("run.name=")), own_name)
    return Outcome(result.returncode, result.stdout, result.stderr, directory / name)


@contextmanager
def running(directory: Path, until: str, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has just printed a line that starts with ``until``."""
    process = subprocess.Popen(
        command(QUICKSTART, directory, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env=environment(),
        # a shell that runs the tests in the background lets its children ignore Ctrl-C
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(until):
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_of(directory: Path) -> list[psutil.Process]:
    """Living rank processes whose run directory is under ``directory``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "megarl" in line and any(str(directory) in word and word.endswith("resolved.yaml") for word in line):
            found.append(process)
    return found


def ledger(outcome: Outcome) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (outcome.directory / "metrics.jsonl").read_text().splitlines()]


def reproducible(outcome: Outcome) -> list[str]:
    """The ledger without clocks and memory, as text."""
    return [
        json.dumps([record["step"], {k: v for k, v in record["metrics"].items() if not NOT_REPRODUCIBLE.match(k)}])
        for record in ledger(outcome)
    ]
