"""Checks of one machine by itself: packages, cores, memory, limits and storage."""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import psutil

from megarl import __version__
from megarl.config.schema import RunConfig
from megarl.launch.doctor.finding import Finding
from megarl.launch.doctor.limits import memory_limit, num_usable_cores

_GIB = 2**30
_MIN_OPEN_FILES = 4096
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.\-]+)(?:\[[^\]]*\])?==([^;\s]+)\s*(;.*extra\s*==.*)?$")


def check_machine(config: RunConfig | None) -> Iterator[Finding]:
    """What all ranks of a machine share, and needs no other machine."""
    yield _versions()
    yield Finding("Python", "ok", f"{platform.python_version()}, {sys.executable}")
    yield _cores()
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


def _cores() -> Finding:
    usable, all_cores = num_usable_cores(), os.cpu_count() or 1
    if usable == all_cores:
        return Finding("cores", "ok", f"all {all_cores}")
    return Finding("cores", "ok", f"{usable} of {all_cores}, by affinity or by a limit of the control group")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free"
    free, limit = memory.available, memory_limit()
    if limit is not None and limit.limit_bytes < memory.total:
        free = min(free, limit.free_bytes)
        text += f"; the control group may use {limit.limit_bytes / _GIB:.1f} GiB and has {free / _GIB:.1f} left"
    if free < 2 * _GIB:
        remedy = "offloaded models live in it: free some, or ask for more (Slurm: --mem; containers: --memory)"
        return Finding("memory", "warning", text, remedy)
    return Finding("memory", "ok", text)


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
    remedy = "check permissions and the mount, or set run.dir"
    try:
        existing = _nearest(wanted.absolute())
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".megarl-doctor-") as file:
            file.write(b"x")
        free = shutil.disk_usage(existing).free
    except OSError as error:
        where = f" ({error.filename})" if isinstance(error, NotADirectoryError) else ""
        return Finding("run directory", "error", f"{wanted} cannot be written: {error.strerror}{where}", remedy)
    text = f"{wanted}: {free / _GIB:.0f} GiB free"
    if free < 5 * _GIB:
        return Finding("run directory", "warning", text, "a checkpoint is about 12 bytes per weight: free some space")
    return Finding("run directory", "ok", text)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists. Anything but a directory there is an OSError."""
    try:
        is_directory = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return _nearest(path.parent)
    if not is_directory:
        raise NotADirectoryError(errno.ENOTDIR, "a file is in its place", str(path))
    return path
