"""Who this process is: the environment that a launcher left -> one record, or None where megarl starts the ranks.

torchrun, Slurm's srun and megarl's own launchers (local, Ray) each have their own variables; nothing else in megarl
reads them. Everything here is a pure function of the environment that is passed in. Gaps and contradictions are named,
because a rank that guesses its number wrong hangs all the others.

Who wins where several launchers left their traces: what megarl handed over, then torchrun, then srun. The inner one was
started by the outer one, and they must agree on what both of them know.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from megarl.config.consistency import check_consistency
from megarl.config.layout import check_layout
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.launch.hostlist import expand_hosts, expand_tasks

Environment = Mapping[str, str]
Launcher = Literal["local", "torchrun", "slurm", "ray"]

# A whole record as JSON: how megarl's own launchers tell a rank who it is.
HANDED_OVER = "MEGARL_RENDEZVOUS"
# Slurm jobs meet on a port from their number: below the range from which systems give ports to anybody who asks.
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
# From here on Slurm's steps are not of srun: the batch script, the shell that salloc opens on the first node, and more.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# What Open MPI, and MPICH and its relatives, tell a process of the number of processes.
_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
# A federation of Slurm clusters numbers its jobs up to 2**32.
_MAX_DIGITS = 10
# What CUDA takes for a device; a list of devices ends before anything else.
_DEVICE = re.compile(r"[0-9]+|GPU-.+|MIG-.+")


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank: its numbers, and where it meets the others.

    ``0 <= rank < size``, ``0 <= local_rank < local_size``, ``0 <= node_rank < num_nodes``, ``local_size <= size``.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    master_address: str
    master_port: int
    # which of the devices that this process sees is its own
    device_index: int
    # ``tcp://HOST:PORT`` (rank 0 listens), ``inherited://HOST:PORT/FD`` (it inherits a socket that listens) or
    # ``agent://HOST:PORT/N`` (somebody else listens there, and this is the N-th time)
    meeting: str
    # how often the launcher started the ranks again by itself
    num_restarts: int = 0


def read_rendezvous(environment: Environment, config: RunConfig) -> RankRecord | None:
    """The rank that this process is, in a run with this configuration. None: nobody launched it as a rank."""
    record = identify(environment)
    if record is None or (record.launcher == "slurm" and record.size == 1 and config.run.num_ranks > 1):
        # `srun --pty bash`, or one task on one node: a place to start ranks, not a rank
        return None
    if record.size != config.run.num_ranks:
        raise ConfigError(
            "MRL-1110",
            f"WORLD_SIZE={record.size} ({record.launcher}), but the parallel layout needs {config.run.num_ranks}: "
            f"{describe_layout(config)}.\n{_way_to_agree(config, record.size)}",
        )
    if config.run.device != "cpu":
        _require_devices(environment, record)
    return record


def identify(environment: Environment) -> RankRecord | None:
    """The same without a configuration to compare with."""
    if HANDED_OVER in environment:
        return _checked(_handed_over(environment))
    if "RANK" in environment or "WORLD_SIZE" in environment:
        return _checked(_from_torchrun(environment))
    if _is_srun_task(environment):
        return _checked(_from_slurm(environment))
    for name in _SIZES_OF_MPI:
        if environment.get(name, "1") not in ("0", "1"):
            raise ConfigError(
                "MRL-1601",
                f"mpirun is not a launcher of megarl, but {name}={environment[name][:20]!r} says that it started this "
                "process: each of them would train a run of its own.\n"
                "Start the ranks with torchrun, srun or `megarl launch ray`, or run `megarl train` once per machine "
                "without mpirun: it starts them itself.",
            )
    return None


def num_idle_nodes(environment: Environment) -> int:
    """How many nodes Slurm gave this job of which nothing is used, because no srun starts ranks there."""
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return 0 if _is_srun_task(environment) or not nodes.isdecimal() else max(0, int(nodes) - 1)


def local_record(rank: int, size: int, port: int, listener: int) -> RankRecord:
    """One of the ranks that megarl itself starts on this machine. Rank 0 inherits who listens at the port."""
    meeting = f"inherited://127.0.0.1:{port}/{listener}"
    return RankRecord("local", rank, size, rank, size, 0, 1, "127.0.0.1", port, rank, meeting)


def hand_over(record: RankRecord) -> dict[str, str]:
    """The variables that make a process this rank: the record, and the names that vendors' code may look for."""
    known = {
        "RANK": record.rank,
        "WORLD_SIZE": record.size,
        "LOCAL_RANK": record.local_rank,
        "LOCAL_WORLD_SIZE": record.local_size,
        "GROUP_RANK": record.node_rank,
        "MASTER_PORT": record.master_port,
    }
    variables = {name: str(value) for name, value in known.items()}
    return {**variables, "MASTER_ADDR": record.master_address, HANDED_OVER: json.dumps(asdict(record))}


def _handed_over(environment: Environment) -> RankRecord:
    try:
        tree: dict[str, Any] = json.loads(environment[HANDED_OVER])
        record = RankRecord(**tree)
        example = asdict(local_record(0, 1, 1, 0))
        if any(type(tree[field.name]) is not type(example[field.name]) for field in fields(RankRecord)):
            raise TypeError("a value has another type")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "MRL-1602", f"{HANDED_OVER} is not a rank's record: {error}.\nOnly megarl's own launchers set it: unset it."
        ) from None
    _require_agreement(environment, record, "megarl", {"RANK": record.rank, "WORLD_SIZE": record.size})
    return record


def _from_torchrun(environment: Environment) -> RankRecord:
    rank, size = _number(environment, "RANK", "torchrun"), _number(environment, "WORLD_SIZE", "torchrun")
    local_size = _number(environment, "LOCAL_WORLD_SIZE", "torchrun", default=size)
    local_rank = _number(environment, "LOCAL_RANK", "torchrun", default=0 if size == 1 else None)
    if "LOCAL_WORLD_SIZE" not in environment and local_rank != rank:
        raise _gap("LOCAL_WORLD_SIZE", "torchrun", f"LOCAL_RANK={local_rank} is not RANK={rank}, so there are nodes")
    address = _address(_text(environment, "MASTER_ADDR", "torchrun"))
    port = _number(environment, "MASTER_PORT", "torchrun")
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    num_restarts = _number(environment, "TORCHELASTIC_RESTART_COUNT", "torchrun", default=0)
    record = RankRecord(
        "torchrun",
        rank,
        size,
        local_rank,
        local_size,
        _number(environment, "GROUP_RANK", "torchrun", default=rank // max(1, local_size)),
        _number(environment, "GROUP_WORLD_SIZE", "torchrun", default=-(-size // max(1, local_size))),
        address,
        port,
        local_rank,
        f"{_meeting('agent', address, port)}/{num_restarts}" if has_agent else _meeting("tcp", address, port),
        num_restarts,
    )
    if _is_srun_task(environment):
        num_nodes = _number(environment, "SLURM_STEP_NUM_NODES", "srun", default=record.num_nodes)
        if num_nodes != record.num_nodes:
            raise ConfigError(
                "MRL-1603",
                f"srun started {num_nodes} nodes, but torchrun inside it knows {record.num_nodes}.\n"
                f"Each node would train a run of its own. Write torchrun --nnodes={num_nodes} "
                "--node-rank=$SLURM_NODEID --master-addr=... --master-port=...",
            )
    return record


def _is_srun_task(environment: Environment) -> bool:
    """Only tasks of a step: the shell of an sbatch script has SLURM_PROCID=0 as well, and is nobody's rank."""
    step = environment.get("SLURM_STEP_ID", "batch")
    is_number = step.isascii() and step.isdecimal() and len(step) <= _MAX_DIGITS
    return "SLURM_PROCID" in environment and is_number and int(step) < _FIRST_SPECIAL_STEP


def _from_slurm(environment: Environment) -> RankRecord:
    rank = _number(environment, "SLURM_PROCID", "srun")
    size = _number(environment, _known(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "srun")
    local_rank = _number(environment, "SLURM_LOCALID", "srun")
    node_rank = _number(environment, "SLURM_NODEID", "srun")
    per_node = _text(environment, _known(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"), "srun")
    tasks = expand_tasks(per_node)
    if sum(tasks) != size or node_rank >= len(tasks):
        raise ConfigError(
            "MRL-1603",
            f"Slurm says {size} tasks, and {per_node} per node, and this is node {node_rank}.\n"
            "Start all ranks with one srun.",
        )
    address = (
        _address(environment.get("MASTER_ADDR", "").strip())
        or (
            expand_hosts(_text(environment, _known(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "srun"))[
                0
            ]
        )
    )
    if "MASTER_PORT" in environment:
        port = _number(environment, "MASTER_PORT", "srun")
    else:
        job, step = (_number(environment, name, "srun") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = _FIRST_PORT + (job + 131 * step) % _NUM_PORTS  # another step of the same job meets elsewhere
    num_restarts = _number(environment, "SLURM_RESTART_COUNT", "srun", default=0)
    # Slurm may show each task only its own GPU; then it is the first one that this process sees.
    device = 0 if len(visible_devices(environment) or ()) == 1 else local_rank
    return RankRecord(
        "slurm", rank, size, local_rank, tasks[node_rank], node_rank, len(tasks), address, port, device,
        _meeting("tcp", address, port), num_restarts,
    )  # fmt: skip


def _address(text: str) -> str:
    """MASTER_ADDR as a name or an IP address, without the brackets that URLs put around one."""
    address = text.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(address)
        return address
    except ValueError:
        if re.fullmatch(r"[\w.-]*", address):
            return address
    meant = re.fullmatch(r"(?:\w+://)?\[?([\w.:-]+?)\]?(?::(\d+))?/?", text)
    host, port = meant.groups() if meant else ("10.0.0.1", None)
    raise ConfigError(
        "MRL-1602",
        f"MASTER_ADDR={text[:80]!r} is not a host: it is a name or an IP address, without a port and without //.\n"
        f"Write MASTER_ADDR={host} MASTER_PORT={port or 29500}",
    )


def _meeting(scheme: str, address: str, port: int) -> str:
    return f"{scheme}://[{address}]:{port}" if ":" in address else f"{scheme}://{address}:{port}"


def _checked(record: RankRecord) -> RankRecord:
    """What every record promises, whoever wrote the numbers."""
    limits = {
        "rank": ("size", record.rank, record.size),
        "local rank": ("local size", record.local_rank, record.local_size),
        "node rank": ("number of nodes", record.node_rank, record.num_nodes),
    }
    for name, (of, number, size) in limits.items():
        if size < 1:
            raise ConfigError(
                "MRL-1602", f"{record.launcher} says that the {of} is {size}.\nThere is at least one: this process."
            )
        if number >= size:
            raise ConfigError(
                "MRL-1602",
                f"{record.launcher} gave this process {name} {number}, but the {of} is {size}.\n"
                f"It must be one of 0 to {size - 1}: start all ranks with one command.",
            )
    is_alone = record.num_nodes == 1
    if record.size < record.local_size + record.num_nodes - 1 or (is_alone and record.size != record.local_size):
        raise ConfigError(
            "MRL-1602",
            f"{record.launcher} says {record.size} ranks in all, {record.local_size} on this node, on "
            f"{record.num_nodes} node{'s' * (not is_alone)}, which cannot be.\nStart all ranks with one command.",
        )
    if is_alone and record.rank != record.local_rank:
        raise ConfigError(
            "MRL-1602",
            f"{record.launcher} made this process rank {record.rank} of all and rank {record.local_rank} of its node, "
            "but there is one node only, on which they are the same.\nStart all ranks with one command.",
        )
    if not 0 < record.master_port < 2**16:
        raise ConfigError(
            "MRL-1602", f"MASTER_PORT={record.master_port} is not a port.\nA port is one of 1 to 65535, such as 29500."
        )
    return record


def _require_agreement(environment: Environment, record: RankRecord, who: str, known: dict[str, int]) -> None:
    for name, value in known.items():
        if name in environment and environment[name] != str(value):
            raise ConfigError(
                "MRL-1603",
                f"{who} made this process {name}={value} of {record.size}, but {name}={environment[name][:20]!r} in "
                "the environment says otherwise.\nUse one launcher: do not start torchrun or srun inside a rank.",
            )


def _require_devices(environment: Environment, record: RankRecord) -> None:
    """Each rank has its own GPU, or none of them has any."""
    visible = visible_devices(environment)
    # torchrun shows all ranks of a node the same devices
    num_needed = record.local_size if record.launcher == "torchrun" else record.device_index + 1
    if visible and num_needed > len(visible):
        raise ConfigError(
            "MRL-1605",
            f"rank {record.rank} is number {record.local_rank} of {record.local_size} on its node, but "
            f"CUDA_VISIBLE_DEVICES shows it {len(visible)} GPUs.\n"
            f"Show {record.local_size}, or start {len(visible)} ranks per node.",
        )


def visible_devices(environment: Environment) -> list[str] | None:
    """The GPUs that are shown, which are those before the first that is none, as for CUDA; None: all."""
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return None
    return list(itertools.takewhile(_DEVICE.fullmatch, (one.strip() for one in listed.split(","))))


def _way_to_agree(config: RunConfig, size: int) -> str:
    """Whether the configuration may have the number of ranks that there are, and what to do if not."""
    other = config.model_copy(update={"run": config.run.model_copy(update={"num_ranks": size})})
    if check_layout(other) or check_consistency(other):
        return f"Start {config.run.num_ranks} ranks: this layout cannot have {size}."
    return f"Add run.num_ranks={size} to the command, or start {config.run.num_ranks} ranks."


def describe_layout(config: RunConfig) -> str:
    """The factors of ``run.num_ranks``."""
    parallel = config.actor.parallel
    cp = f" x cp {parallel.cp_size}" if parallel.cp_size > 1 else ""
    return f"tp {parallel.tp_size} x pp {parallel.pp_size}{cp} x dp {config.dp_size}"


def _known(environment: Environment, preferred: str, other: str) -> str:
    """The step's own variable; the job's where this Slurm does not set it."""
    return preferred if preferred in environment or other not in environment else other


def _text(environment: Environment, name: str, launcher: str) -> str:
    text = environment.get(name, "").strip()
    if not text:
        raise _gap(name, launcher)
    return text


def _number(environment: Environment, name: str, launcher: str, *, default: int | None = None) -> int:
    if name not in environment and default is not None:
        return default
    text = _text(environment, name, launcher)
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ConfigError("MRL-1602", f"{name}={text[:20]!r} is not a number.\n{_set_by(name, launcher)}")
    return int(text)


def _gap(name: str, launcher: str, why: str = "") -> ConfigError:
    reason = why or f"other variables of {launcher} are"
    return ConfigError("MRL-1601", f"{name} is not set, but {reason}.\n{_set_by(name, launcher)}")


def _set_by(name: str, launcher: str) -> str:
    return (
        f"{launcher} sets it for every rank. Start the ranks with {launcher}, or unset its variables to let megarl "
        f"start them on this machine."
        if name not in ("MASTER_ADDR", "MASTER_PORT")
        else f"{name} says where rank 0 is: set it for every rank, the same everywhere."
    )
