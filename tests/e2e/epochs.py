"""Runs that are killed again and again, and what they drew from their data by their own record."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megarl.core.faults import VARIABLE
from megarl.data.record import read_groups
from tests.e2e.runs import QUICKSTART, command, environment

NUM_ROWS, BATCH_SIZE, NUM_EPOCHS = 101, 8, 3
NUM_STEPS = -(-NUM_ROWS * NUM_EPOCHS // BATCH_SIZE)
# Steps that no checkpoint holds are made again: with one in three, most kills have some.
SETTINGS = (
    "run.name=epochs",
    "run.num_ranks=1",
    f"run.num_steps={NUM_STEPS}",
    "warmup=null",
    f"rollout.prompts_per_step={BATCH_SIZE}",
    "rollout.group_size=2",
    "rollout.max_new_tokens=2",
    "rollout.record=true",
    "algorithm.num_minibatches=1",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=32",
    "model.config.num_hidden_layers=1",
    "model.config.head_dim=8",
    "checkpoint.every=3",
    "eval.sets={held_out: {data: builtin:sort_held_out, max_prompts: 1}}",
    "eval.every=0",
    "eval.before_training=false",
    "eval.at_end=false",
)
# before, in and after a step, and in all parts of a save
POINTS = (
    "step/rollout",
    "step/update",
    "step/record",
    "step/end",
    "save/snapshot",
    "save/file-half-written",
    "save/before-rename",
    "save/after-rename",
    "save/committed",
)


def write_rows(path: Path) -> list[str]:
    """A file of rows that tell themselves apart; their ids."""
    rows = [{"id": f"row {i}", "prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [str(row["id"]) for row in rows]


def kills(num_kills: int, seed: int) -> list[str]:
    """Faults of `core.faults` in ascending steps; a save has its own points in the steps that save."""
    generator = random.Random(seed)
    steps = sorted(generator.sample(range(2, NUM_STEPS), num_kills))
    points = [point for point in POINTS for _ in range(2)]
    generator.shuffle(points)
    chosen = []
    for step, point in zip(steps, points, strict=False):
        saves = step % 3 == 0
        chosen.append(f"{point if saves or point.startswith('step/') else 'step/update'}:0:{step}=kill")
    return chosen


def run_once(directory: Path, fault: str | None) -> subprocess.CompletedProcess[str]:
    """The run in one process, as torchrun would start it; the fault kills the process itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.run(
        command(QUICKSTART, directory, *SETTINGS, f"data.train={directory / 'rows.jsonl'}"),
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment(**rank, **({VARIABLE: fault} if fault else {})),
        timeout=600,
        check=False,
    )


def train_with_kills(directory: Path, faults: Sequence[str]) -> int:
    """Run, be killed, run again; at last to the end. How often the kernel killed it."""
    num_killed = 0
    for fault in faults:
        outcome = run_once(directory, fault)
        assert outcome.returncode in (0, -signal.SIGKILL), (fault, outcome.stdout, outcome.stderr)
        num_killed += outcome.returncode == -signal.SIGKILL
    outcome = run_once(directory, None)
    assert outcome.returncode == 0, (outcome.stdout, outcome.stderr)
    return num_killed


def epochs_drawn(directory: Path) -> list[Counter[str]]:
    """How often each row was trained on, epoch by epoch, by the record of the steps that count."""
    drawn = []
    for step in range(1, NUM_STEPS + 1):
        (groups,) = read_groups(directory / "epochs" / "rollouts" / f"step_{step:06d}.jsonl").values()
        drawn += [group.prompt.id for group in groups]
    return [Counter(drawn[NUM_ROWS * epoch : NUM_ROWS * (epoch + 1)]) for epoch in range(NUM_EPOCHS)]
