"""Real runs of the real command, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

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
    """This process's environment without anything that a launcher may have put into it."""
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": str(ROOT)} | extra


def train(config: Path, directory: Path, *overrides: str, cwd: Path | None = None) -> Outcome:
    """Run to the end and check that no process is left."""
    result = subprocess.run(
        command(config, directory, *overrides),
        capture_output=True,
        text=True,
        cwd=cwd or directory,
        env=environment(),
        timeout=300,
        check=False,
    )
    assert ranks_of(directory) == [], "a rank outlived the command"
    name = next((o.partition("=")[2] for o in overrides if o.startswith("run.name=")), "quickstart")
    return Outcome(result.returncode, result.stdout, result.stderr, directory / name)


def ranks_of(directory: Path) -> list[psutil.Process]:
    """Living rank processes whose run directory is under ``directory``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "megarl" in line and any(str(directory) in word and word.endswith("resolved.yaml") for word in line):
            found.append(process)
    return found
