"""Environment variables that contradict each other, or the run. A pure function of the environment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.faults import VARIABLE as FAULT
from megarl.launch.doctor.finding import Finding, as_finding
from megarl.launch.rendezvous import identify, num_idle_nodes, read_rendezvous, visible_devices

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "*")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What of the machine decides whether a variable is right."""

    interfaces: Collection[str]
    # that all ranks of this machine have together
    num_cores: int
    # the interface that leads to rank 0; None: not known, or nobody launched this
    road: str | None = None


def check_variables(environment: Mapping[str, str], config: RunConfig | None, around: Surroundings) -> list[Finding]:
    """All conflicts, or one line that says that there are none; and what variables hide."""
    found = [
        *_launcher(environment, config),
        *_allocation(environment),
        *_devices(environment, config),
        *_interfaces(environment, around),
        *_threads(environment, around.num_cores),
        *_proxies(environment),
        *_faults(environment),
    ]
    if any(one.level != "ok" for one in found):
        return found
    return [*found, Finding("environment", "ok", "no variables that contradict each other")]


def _launcher(environment: Mapping[str, str], config: RunConfig | None) -> Iterator[Finding]:
    try:
        if config is not None:
            read_rendezvous(environment, config)
        else:
            identify(environment)
    except ConfigError as error:
        yield as_finding("environment", error)


def _allocation(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Nodes of a Slurm job that nobody looks at."""
    num_idle = num_idle_nodes(environment)
    if num_idle > 0 and _num_nodes(environment) is None:
        yield Finding(
            "environment",
            "warning",
            f"this is a Slurm job with {num_idle + 1} nodes, but without srun only this one is looked at",
            "srun --ntasks-per-node=RANKS python -m megarl doctor CONFIG, with as many tasks as the run has ranks",
        )


def _num_nodes(environment: Mapping[str, str]) -> int | None:
    """Of the ranks that a launcher started; None: nobody did."""
    try:
        record = identify(environment)
    except ConfigError:
        return 1  # told elsewhere
    return None if record is None else record.num_nodes


def _devices(environment: Mapping[str, str], config: RunConfig | None) -> Iterator[Finding]:
    """CUDA reads the list up to the first entry that it does not know, and says nothing."""
    listed, seen = environment.get("CUDA_VISIBLE_DEVICES"), visible_devices(environment)
    wanted = "auto" if config is None else config.run.device
    if listed is None or seen is None or wanted == "cpu":
        return
    entries = [one.strip() for one in listed.split(",")]
    shown = f"CUDA_VISIBLE_DEVICES={listed[:40]}"
    is_meant = not seen and entries in ([""], ["-1"])
    if seen and len(seen) < len(entries):
        text = f"{shown} ends at {entries[len(seen)][:20]!r}, which is no device: {len(seen)} can be seen"
        yield Finding("environment", "warning", text, "list numbers or UUIDs of GPUs (nvidia-smi -L)")
    elif not seen and wanted == "cuda":
        text = f"run.device=cuda, but {shown} hides all GPUs"
        yield Finding("environment", "error", text, "unset CUDA_VISIBLE_DEVICES")
    elif is_meant:
        yield Finding("environment", "ok", f"{shown} hides all GPUs")
    elif not seen:
        text = f"{shown} hides all GPUs, because {entries[0][:20]!r} is no device"
        yield Finding("environment", "warning", text, "list numbers or UUIDs of GPUs (nvidia-smi -L)")


def _interfaces(environment: Mapping[str, str], around: Surroundings) -> Iterator[Finding]:
    """What is wrong here is called ``interface``: ranks that have it must not try to connect."""
    interfaces, chosen = around.interfaces, {}
    num_nodes = _num_nodes(environment) or 1
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(name, "")
        exact = value.removeprefix("=")
        if not value or value.startswith("^"):  # NCCL: anything but these
            continue
        chosen[name] = exact
        known = [one for one in exact.split(",") if any(own.startswith(one) for own in interfaces)]
        if not known or (name == "GLOO_SOCKET_IFNAME" and exact not in interfaces):
            text = f"{name}={value[:40]}, but the interfaces here are {', '.join(sorted(interfaces))}"
            yield Finding("interface", "error", text, f"unset {name}: megarl finds the one that leads to rank 0")
        elif exact == "lo" and num_nodes > 1 and around.road != "lo":
            text = f"{name}=lo, but there are {num_nodes} nodes, and loopback does not leave this one"
            yield Finding("interface", "error", text, f"unset {name}: megarl finds the one that leads to rank 0")
    if len(set(chosen.values())) > 1:
        text = ", ".join(f"{name}={value[:40]}" for name, value in chosen.items())
        yield Finding("environment", "warning", f"{text} use different networks", "set both to the same, or neither")


def _threads(environment: Mapping[str, str], num_cores: int) -> Iterator[Finding]:
    threads = environment.get("OMP_NUM_THREADS", "")
    local = environment.get("LOCAL_WORLD_SIZE", "1")
    if threads and not threads.isdecimal():
        yield Finding("environment", "error", f"OMP_NUM_THREADS={threads[:20]!r} is not a number", "unset it")
    elif threads and local.isdecimal() and int(threads) * int(local) > num_cores:
        text = f"{local} ranks with OMP_NUM_THREADS={threads} each, on {num_cores} cores"
        yield Finding("environment", "warning", text, f"set OMP_NUM_THREADS={max(1, num_cores // max(1, int(local)))}")


def _proxies(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        spared = environment.get("no_proxy", environment.get("NO_PROXY", "")).split(",")
        if environment.get(name) and not any(one.strip() in _LOOPBACK_NAMES for one in spared):
            text = f"{name} is set, and no_proxy does not spare this machine: no server on 127.0.0.1 would be found"
            yield Finding("environment", "warning", text, "set no_proxy=127.0.0.1,localhost and the nodes' addresses")
            return


def _faults(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get(FAULT):
        yield Finding("environment", "warning", f"{FAULT} is set: ranks will fail on purpose", f"unset {FAULT}")
