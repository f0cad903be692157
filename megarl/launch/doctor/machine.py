"""Checks of one machine by itself: packages, devices, memory, limits and storage."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from megarl import __version__
from megarl.config.schema import RunConfig
from megarl.launch.doctor.finding import Finding, Level

_GIB = 2**30
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_MIN_OPEN_FILES = 4096
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.\-]+)(?:\[[^\]]*\])?==([^;\s]+)\s*(;.*extra\s*==.*)?$")


def check_machine(config: RunConfig | None, num_local_ranks: int) -> Iterator[Finding]:
    """Everything that needs no other machine."""
    yield _versions()
    yield from _devices(config, num_local_ranks)
    yield _memory()
    yield _shared_memory()
    yield _open_files()
    yield _storage(config)


def _versions() -> Finding:
    """Against the matrix that this megarl was built with."""
    try:
        required = metadata.requires("megarl") or []
    except metadata.PackageNotFoundError:
        return Finding(
            "versions",
            "warning",
            f"megarl {__version__} is not installed, so its matrix is not known",
            "pip install it",
        )
    missing, other, num_right = [], [], 0
    for text in required:
        found = _REQUIREMENT.match(text)
        if found is None:
            continue
        name, wanted, extra = found.groups()
        try:
            installed = metadata.version(name).partition("+")[0]  # 2.13.0+cpu is 2.13.0
        except metadata.PackageNotFoundError:
            if extra is None:
                missing.append(f"{name} {wanted}")
            continue
        if installed == wanted:
            num_right += 1
        else:
            other.append(f"{name} {installed} (tested: {wanted})")
    if missing:
        return Finding("versions", "error", f"not installed: {', '.join(missing)}", "pip install megarl, or make setup")
    if other:
        remedy = "install the tested versions: pip install --constraint constraints.txt megarl"
        return Finding("versions", "warning", ", ".join(sorted(set(other))), remedy)
    return Finding("versions", "ok", f"megarl {__version__}, {num_right} packages as in the matrix")


def _devices(config: RunConfig | None, num_local_ranks: int) -> Iterator[Finding]:
    import torch

    wanted = config.run.device if config is not None else "auto"
    if not torch.cuda.is_available():
        if wanted == "cuda":
            remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, install a CUDA build of torch, or set run.device=cpu"
            yield Finding("device", "error", f"run.device=cuda, but torch {torch.__version__} finds no GPU", remedy)
            return
        yield Finding("device", "ok", f"CPU, {os.cpu_count()} cores (torch {torch.__version__} finds no GPU)")
        return
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    nccl = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
    text = f"{count} x {names}, CUDA {torch.version.cuda}, NCCL {nccl}"
    if count < num_local_ranks and wanted != "cpu":
        yield Finding(
            "device", "error", f"{text}: too few for {num_local_ranks} ranks here", "start fewer ranks per node"
        )
    else:
        yield Finding("device", "ok", text)
    for name, module, remedy in (
        ("Transformer Engine", "transformer_engine", 'pip install "megarl[gpu]": layers are slower without it'),
        ("Apex", "apex", ""),
        ("SGLang", "sglang", 'pip install "megarl[gpu]", or name its interpreter in generation.python'),
    ):
        is_there = importlib.util.find_spec(module) is not None
        is_needed = bool(remedy) and (
            module != "sglang" or (config is not None and config.generation.engine == "sglang")
        )
        level: Level = "warning" if is_needed and not is_there else "ok"
        text = "installed" if is_there else "not installed" + ("" if is_needed else ", not needed")
        yield Finding(name, level, text, remedy if level == "warning" else "")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    limit = _cgroup_limit()
    if limit is not None and limit < memory.total:
        text += f", this container may use {limit / _GIB:.1f} GiB"
    if min(memory.available, limit or memory.available) < 2 * _GIB:
        return Finding(
            "memory", "warning", text, "offloaded models live in it: free some, or raise the container's limit"
        )
    return Finding("memory", "ok", text)


def _cgroup_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() else None
    return None


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return Finding("/dev/shm", "warning", "there is none", "mount a tmpfs there: NCCL and servers need it")
    text = f"{free / _GIB:.1f} GiB free"
    if free < _GIB:
        return Finding("/dev/shm", "warning", text, "start the container with --shm-size=8g, or remove old files")
    return Finding("/dev/shm", "ok", text)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES:
        return Finding("open files", "warning", f"at most {soft} (hard limit {hard})", "ulimit -n 65536")
    return Finding("open files", "ok", "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def _storage(config: RunConfig | None) -> Finding:
    """Whether runs can be written where they are to be; the nearest directory that exists is tried."""
    wanted = Path(config.run.dir if config is not None else "runs")
    existing = next(path for path in (wanted.absolute(), *wanted.absolute().parents) if path.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".megarl-doctor-") as file:
            file.write(b"x")
    except OSError as error:
        remedy = "check permissions and the mount, or set run.dir"
        return Finding("run directory", "error", f"{wanted} cannot be written: {error.strerror}", remedy)
    free = shutil.disk_usage(existing).free
    text = f"{wanted}: {free / _GIB:.0f} GiB free"
    if free < 5 * _GIB:
        return Finding("run directory", "warning", text, "a checkpoint is about 12 bytes per weight: free some space")
    return Finding("run directory", "ok", text)
