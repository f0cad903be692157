"""Environment variables that contradict each other, or the run. A pure function of the environment."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.core.faults import VARIABLE as FAULT
from megarl.launch.doctor.finding import Finding
from megarl.launch.rendezvous import identify, read_rendezvous

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "*")


def check_variables(
    environment: Mapping[str, str], config: RunConfig | None, interfaces: Collection[str], num_cores: int
) -> list[Finding]:
    """All conflicts; one line that says so if there are none."""
    found = [
        *_launcher(environment, config),
        *_devices(environment, config),
        *_interfaces(environment, interfaces),
        *_threads(environment, num_cores),
        *_proxies(environment),
        *_faults(environment),
    ]
    return found or [Finding("environment", "ok", "no variables that contradict each other")]


def _launcher(environment: Mapping[str, str], config: RunConfig | None) -> Iterator[Finding]:
    try:
        if config is not None:
            read_rendezvous(environment, config)
        else:
            identify(environment)
    except ConfigError as error:
        first, _, rest = str(error).partition("\n")
        yield Finding("environment", "error", first, rest)


def _devices(environment: Mapping[str, str], config: RunConfig | None) -> Iterator[Finding]:
    if (
        config is not None
        and config.run.device == "cuda"
        and environment.get("CUDA_VISIBLE_DEVICES", "0").strip() == ""
    ):
        text = "run.device=cuda, but CUDA_VISIBLE_DEVICES is empty and hides all GPUs"
        yield Finding("environment", "error", text, "unset CUDA_VISIBLE_DEVICES")


def _interfaces(environment: Mapping[str, str], interfaces: Collection[str]) -> Iterator[Finding]:
    chosen = {}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = environment.get(name, "")
        exact = value.removeprefix("=")
        if not value or value.startswith("^"):  # NCCL: anything but these
            continue
        chosen[name] = exact
        known = [one for one in exact.split(",") if any(own.startswith(one) for own in interfaces)]
        if not known or (name == "GLOO_SOCKET_IFNAME" and exact not in interfaces):
            text = f"{name}={value[:40]}, but the interfaces here are {', '.join(sorted(interfaces))}"
            yield Finding("environment", "error", text, f"unset {name}: megarl finds the one that leads to rank 0")
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
