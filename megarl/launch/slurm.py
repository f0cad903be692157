"""The sbatch file of a run: rendered from its configuration, checked against its layout, and submitted.

One srun starts one task per rank, and `launch.rendezvous` reads who is who from srun's own variables. There is no
torchrun in between: it would turn every exit code into 1, not pass SIGUSR1 on, and need a meeting of its own.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.launch.layout import num_spare_gpus, warn_of_reward_nodes
from megarl.launch.rendezvous import describe_layout

# minutes, M:S, H:M:S, D-H, D-H:M, D-H:M:S
_TIME = re.compile(r"(?:(\d{1,5})-)?(\d{1,6})(?::(\d{1,4}))?(?::(\d{1,4}))?")
_PARTITION = re.compile(r"[A-Za-z0-9_.,-]+")
_MAX_SUGGESTIONS = 8
_EXAMPLE_CPUS = 8
# Slurm may warn up to a minute earlier than asked.
_SHORTEST_RUN_SECONDS = 60
# what sbatch takes behind --signal
_EARLIEST_WARNING_SECONDS = 65_535
# Longer than the doctor waits for ranks that do not come.
DOCTOR_TIME = "00:30:00"

_HEADER = """\
#!/bin/bash
# megarl on {nodes} x {ranks_per_node} ranks under Slurm, as `megarl launch slurm` wrote it. Yours to edit.
#   sbatch FILE [KEY=VALUE ...]
# One task is one rank. {save_before} seconds before the time limit the run is saved and goes back into the queue.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks_per_node}
#SBATCH --time={time}
#SBATCH --signal=B:USR1@{save_before}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# A rank shares its cores with its servers and reward workers; Slurm gives it one if nothing is said (--cpus-per-rank of
# `megarl launch slurm`). --mem=0 is all memory of a node, --exclusive the whole node. Remove a # to ask for it:
{cpus}#SBATCH --cpus-per-task={cpus_per_rank}
##SBATCH --mem=0
##SBATCH --exclusive
"""

_DOCTOR_HEADER = """\
#!/bin/bash
# megarl doctor on {nodes} x {ranks_per_node} ranks, as `megarl launch slurm --doctor` wrote it. Yours to edit.
#   sbatch FILE [KEY=VALUE ...]
#SBATCH --job-name={name}-doctor
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks_per_node}
#SBATCH --time={time}
#SBATCH --output=%x-%j.log
{cpus}#SBATCH --cpus-per-task={cpus_per_rank}
"""

_HOOKS = """\

# What a node needs before megarl can start; sbatch hands on the environment that it was called in. For example:
#   module load cuda
#   source /shared/venv/bin/activate
# In a container (Slurm's pyxis): container=(--container-image=/shared/megarl.sqsh --container-mounts=/shared:/shared)
container=()

# megarl meets on the first node, at a port that follows from the job's number, over the interface that leads there.
# To choose yourself:
#   export MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0
"""

_DOCTOR = """\

# One task is one rank, as in training. Rank 0 tells what all of them found, and may be the last to leave.
srun --kill-on-bad-exit=0 --wait=0 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\
    "${{container[@]}}" bash -c 'exec "$@" 2>&1' bash "${{PYTHON:-python}}" -m megarl doctor {words} "$@"
"""

_TRAINING = """\

echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST: restart ${{SLURM_RESTART_COUNT:-0}} at $(date --iso-8601=seconds)"

# Slurm warns this shell only, which passes it on. The exit code is known once nothing interrupted the wait for it.
step= warned=
pass_on() {{
    warned=yes interrupted=yes
    [ -z "$step" ] || kill -USR1 "$step"
}}
trap pass_on USR1

# A rank that fails is named by megarl, which ends all others within seconds; --wait is for those that it cannot reach.
# (--kill-on-bad-exit=1 would kill ranks that are still saving as soon as the first one has saved and left.)
# 2>&1 in the task: Slurm carries the two streams separately, in pieces, and would mix them within a line.
srun --kill-on-bad-exit=0 --wait=60 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} \\
    "${{container[@]}}" bash -c 'exec "$@" 2>&1' bash "${{PYTHON:-python}}" -m megarl train {words} "$@" &
step=$!
[ -z "$warned" ] || pass_on

interrupted=yes
while [ -n "$interrupted" ]; do
    interrupted=
    wait "$step"
    code=$?
done

# 75: everything is saved. 76: so it is, but no step was finished since the start. 138: the warning came even before
# megarl could listen. Where a start gets nowhere, the next one would not either: the job ends.
if [ -n "$warned" ] && [ "$code" -eq 75 ]; then
    echo "job $SLURM_JOB_ID goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
elif [ -n "$warned" ] && {{ [ "$code" -eq 76 ] || [ "$code" -eq 138 ]; }}; then
    code=76
    echo "job $SLURM_JOB_ID ends: no step was finished since restart ${{SLURM_RESTART_COUNT:-0}}: raise --time," \\
        "or lower the seconds of --signal. The same sbatch goes on."
fi
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class SlurmRequest:
    """What a job asks Slurm for. ``ranks_per_node`` None: as many as the run's ranks give."""

    nodes: int
    ranks_per_node: int | None
    time: str
    # seconds before the time limit at which the run is saved
    save_before: int
    partition: str | None
    # None: what Slurm gives
    cpus_per_rank: int | None = None


def render(config: RunConfig, request: SlurmRequest, path: Path, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The sbatch file, and what its reader should know about the layout."""
    _require_time_to_save(request)
    return _render(config, request, (_HEADER, _TRAINING), [str(path), *overrides])


def render_doctor(
    config: RunConfig, request: SlurmRequest, path: Path, overrides: Sequence[str]
) -> tuple[str, list[str]]:
    """The same for ``megarl doctor`` in place of the training, on as many ranks."""
    _require_time(request)
    return _render(config, request, (_DOCTOR_HEADER, _DOCTOR), [str(path), *overrides])


def _render(
    config: RunConfig, request: SlurmRequest, templates: tuple[str, str], words: Sequence[str]
) -> tuple[str, list[str]]:
    ranks_per_node = _ranks_per_node(config, request)
    if request.cpus_per_rank is not None and request.cpus_per_rank < 1:
        raise ConfigError(
            "MRL-1650", f"--cpus-per-rank {request.cpus_per_rank} cannot be.\nIt is a whole number from 1."
        )
    header = templates[0].format(
        name=config.run.name,
        nodes=request.nodes,
        ranks_per_node=ranks_per_node,
        time=request.time,
        save_before=request.save_before,
        cpus="#" if request.cpus_per_rank is None else "",
        cpus_per_rank=request.cpus_per_rank or _EXAMPLE_CPUS,
    )
    header += _partition(request) + _gpus(config, ranks_per_node + num_spare_gpus(config, request.nodes))
    return header + _HOOKS + templates[1].format(words=shlex.join(words)), _warnings(config, ranks_per_node)


def write_script(path: Path, script: str) -> None:
    """Somebody may have edited the file that is there: it is only written if it is the same or gone."""
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != script:
            raise ConfigError(
                "MRL-1653", f"--out {path} is there already, and is another file.\nRemove it, or name another."
            )
        path.write_text(script, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "MRL-1653", f"--out {path} cannot be written: {error.strerror}.\nName a file in a directory that is there."
        ) from None


def submit(script: str) -> str:
    """Hand the script to sbatch; returns what it says."""
    try:
        done = subprocess.run(
            ["sbatch"],
            input=script,
            capture_output=True,
            text=True,
            check=False,
            # the ranks run the megarl that submitted them, also where its environment is not activated
            env={"PYTHON": sys.executable, **os.environ},
        )
    except FileNotFoundError:
        raise ConfigError(
            "MRL-1654",
            "--submit, but there is no sbatch here.\nWrite the file with --out, and submit it where Slurm is.",
        ) from None
    if done.returncode:
        said = " ".join(done.stderr.split())[:400]
        raise ConfigError(
            "MRL-1655",
            f"sbatch did not take the job: {said}\nWrite the file with --out and mend its #SBATCH lines; "
            "`sbatch --test-only FILE` says whether it would be taken.",
        )
    return done.stdout


def _ranks_per_node(config: RunConfig, request: SlurmRequest) -> int:
    num_ranks, nodes = config.run.num_ranks, request.nodes
    if nodes < 1 or (request.ranks_per_node is not None and request.ranks_per_node < 1):
        raise ConfigError(
            "MRL-1650",
            f"--nodes {nodes}"
            + (f" --ranks-per-node {request.ranks_per_node}" if request.ranks_per_node is not None else "")
            + " cannot be.\nNodes and ranks per node are whole numbers from 1.",
        )
    if request.ranks_per_node is None:
        if num_ranks % nodes == 0:
            return num_ranks // nodes
        fitting = [str(n) for n in range(1, num_ranks + 1) if num_ranks % n == 0]
        fitting.sort(key=lambda text: abs(int(text) - nodes))
        shown = ", ".join(sorted(fitting[:_MAX_SUGGESTIONS], key=int))
        unit = math.lcm(nodes, config.actor.parallel.model_parallel_size)
        more = -(-num_ranks // unit) * unit
        raise ConfigError(
            "MRL-1650",
            f"{config.run.name} has {num_ranks} ranks ({describe_layout(config)}), which do not divide among {nodes} "
            f"nodes: {num_ranks} / {nodes} = {num_ranks / nodes:.2f}.\n"
            f"Write --nodes with one of {shown}, or add run.num_ranks={more} to the command.",
        )
    started = nodes * request.ranks_per_node
    if started != num_ranks:
        raise ConfigError(
            "MRL-1650",
            f"{nodes} nodes x {request.ranks_per_node} ranks per node = {started} ranks, but {config.run.name} has "
            f"{num_ranks}: {describe_layout(config)}.\n"
            f"Add run.num_ranks={started} to the command, or change --nodes or --ranks-per-node.",
        )
    return request.ranks_per_node


def _partition(request: SlurmRequest) -> str:
    if request.partition is None:
        return ""
    if _PARTITION.fullmatch(request.partition) is None:
        raise ConfigError(
            "MRL-1652",
            f"--partition {request.partition[:80]!r} cannot be the name of a partition.\n"
            "It has letters, digits, dots, dashes and underscores; `sinfo` lists what there is.",
        )
    return f"#SBATCH --partition={request.partition}\n"


def _require_time(request: SlurmRequest) -> int:
    """In seconds."""
    limit = _seconds(request.time)
    if limit is None:
        raise ConfigError(
            "MRL-1651",
            f"--time {request.time[:40]!r} is not a time limit of Slurm's.\n"
            "Write minutes (90), hours:minutes:seconds (12:00:00), or days-hours (2-12).",
        )
    return limit


def _require_time_to_save(request: SlurmRequest) -> None:
    limit = _require_time(request)
    if limit == 0:
        raise ConfigError(
            "MRL-1651",
            f"--time {request.time} means no limit to Slurm: it would never warn the run that it has to save.\n"
            "Write a limit, such as 24:00:00; the job goes back into the queue as often as it needs to.",
        )
    longest = min(limit - _SHORTEST_RUN_SECONDS, _EARLIEST_WARNING_SECONDS)
    if longest < 1:
        raise ConfigError(
            "MRL-1651",
            f"--time {request.time} = {limit} seconds is too short: Slurm may warn up to a minute early.\n"
            "Write at least two minutes, and more than it takes to start and to make a step.",
        )
    if not 1 <= request.save_before <= longest:
        why = "Slurm warns no earlier" if longest == _EARLIEST_WARNING_SECONDS else f"--time {request.time} = {limit} s"
        raise ConfigError(
            "MRL-1651",
            f"--save-before {request.save_before} seconds cannot be: {why}.\n"
            f"It must be from 1 to {longest}, and longer than a step of the run: what is not saved by then is done "
            "again.",
        )


def _seconds(text: str) -> int | None:
    """Slurm's spellings: the first number means minutes, hours or, before a dash, days."""
    found = _TIME.fullmatch(text)
    if found is None:
        return None
    days, *rest = found.groups()
    first, second, third = (None if part is None else int(part) for part in rest)
    assert first is not None
    if days is not None:
        return ((int(days) * 24 + first) * 60 + (second or 0)) * 60 + (third or 0)
    if third is not None:
        return (first * 60 + (second or 0)) * 60 + third
    return first * 60 + (second or 0)


def _gpus(config: RunConfig, gpus_per_node: int) -> str:
    line = f"SBATCH --gpus-per-node={gpus_per_node}\n"
    if config.run.device == "cuda":
        return f"#{line}"
    if config.run.device == "auto":
        return f"# run.device is auto: where nodes have GPUs, remove one # from the next line\n##{line}"
    return ""


def _warnings(config: RunConfig, ranks_per_node: int) -> list[str]:
    """What is not heeded; and layouts that work, but not as fast as they could: tensor-parallel peers are neighbours
    in rank order.
    """
    tp_size = config.actor.parallel.tp_size
    unheeded = warn_of_reward_nodes(config)
    if ranks_per_node % tp_size == 0:
        return unheeded
    return [
        *unheeded,
        f"warning: tensor-parallel groups of {tp_size} ranks span nodes of {ranks_per_node} ranks, so every layer "
        "waits for the network. Best is a tp_size that divides the ranks of a node.",
    ]
