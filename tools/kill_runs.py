"""Kill ranks of a run at random moments, resume it with the same command, and compare with a run that nobody killed.

    python tools/kill_runs.py --kills 10 --layouts dp2 tp2 pp2

Every kill is a SIGKILL to a random rank, a random time after the run made progress, so it may hit a rollout, an
optimizer step, or any part of a save. At the end the ledger (without clocks and memory) and every saved tensor must be
equal to the last bit.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megarl.checkpoint.store import open_checkpoint  # noqa: E402
from tests.e2e.runs import SHORT, Outcome, command, environment, reproducible, train  # noqa: E402

LAYOUTS = {
    "dp2": ("quickstart.yaml", ()),
    "tp2": ("quickstart_ppo.yaml", ("actor.parallel.tp_size=2", "algorithm.critic_warmup_steps=1")),
    "pp2": ("quickstart.yaml", ("actor.parallel.pp_size=2", "algorithm.kl.coef=0.01")),
}
NUM_STEPS = 24
LONGEST_DELAY_SECONDS = 1.5


def settings(layout: str) -> tuple[Path, tuple[str, ...]]:
    config, overrides = LAYOUTS[layout]
    steps = ("warmup.num_steps=8", f"run.num_steps={NUM_STEPS - 8}", "checkpoint.every=1", "run.name=quickstart")
    return ROOT / "configs" / config, (*SHORT, *steps, *overrides)


def kill_once(layout: str, directory: Path, generator: random.Random) -> str | None:
    """Start the run, kill one rank, wait for the end; None if the run was faster than us."""
    config, overrides = settings(layout)
    ledger = directory / "quickstart" / "metrics.jsonl"
    process = subprocess.Popen(
        command(config, directory, *overrides),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        cwd=directory,
    )
    started = time.time()
    while process.poll() is None and not (ledger.exists() and ledger.stat().st_mtime > started):
        time.sleep(0.05)
    time.sleep(generator.uniform(0, LONGEST_DELAY_SECONDS))
    ranks = psutil.Process(process.pid).children() if process.poll() is None else []
    if not ranks:
        return None
    victim = generator.choice(ranks)
    lines = ledger.read_text(encoding="utf-8").count("\n")
    saving = list((directory / "quickstart" / "checkpoints").glob(".staging*"))
    os.kill(victim.pid, signal.SIGKILL)
    process.wait(timeout=60)
    return f"after {lines} ledger lines{', inside a save' if saving else ''}; exit code {process.returncode}"


def tensors(outcome: Outcome) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(outcome.directory / "checkpoints", NUM_STEPS)
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def compare(layout: str, num_kills: int, generator: random.Random) -> bool:
    config, overrides = settings(layout)
    with tempfile.TemporaryDirectory() as text:
        whole, killed = Path(text) / "whole", Path(text) / "killed"
        whole.mkdir()
        killed.mkdir()
        expected = train(config, whole, *overrides)
        assert expected.code == 0, expected.stderr
        for number in range(num_kills):
            what = kill_once(layout, killed, generator)
            if what is None:
                print(f"{layout}: the run ended before kill {number + 1}", flush=True)
                break
            print(f"{layout}: kill {number + 1} {what}", flush=True)
        resumed = train(config, killed, *overrides)
        same_ledger = reproducible(resumed) == reproducible(expected)
        ours, theirs = tensors(resumed), tensors(expected)
        same_tensors = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
        print(f"{layout}: ledger equal: {same_ledger}; {len(theirs)} saved tensors equal: {same_tensors}", flush=True)
        return resumed.code == 0 and same_ledger and same_tensors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    results = [compare(layout, arguments.kills, generator) for layout in arguments.layouts]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
