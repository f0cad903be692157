"""The two halves of a save: every rank writes its file, the driver makes the whole visible or removes all of it."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megarl.checkpoint import directory as places
from megarl.checkpoint import manifest as manifests
from megarl.checkpoint.manifest import FileRecord, Manifest
from megarl.checkpoint.rank_file import Snapshot, file_name, write_snapshot
from megarl.core.errors import StorageError
from megarl.core.faults import reach
from megarl.core.world import DRIVER


@dataclass(frozen=True, slots=True)
class Save:
    """Everything that a save needs, so that the loop can go on."""

    step: int
    snapshot: Snapshot
    # the rest is the driver's
    progress: dict[str, Any]
    layout: dict[str, int]
    keep: int
    best_step: int | None


def stage(directory: Path, save: Save) -> str:
    """The driver's first part: the name of a fresh staging directory."""
    try:
        staging = places.stage(directory, save.step)
    except OSError as error:
        raise _refused(directory, save.step, error, save.snapshot.num_bytes) from error
    return staging.name


def write_file(staging: Path, save: Save, rank: int) -> dict[str, Any]:
    """Every rank's part: what became of its file, as plain data. Never raises: the other ranks wait for the answer."""
    report: dict[str, Any] = {"num_bytes": save.snapshot.num_bytes}
    try:
        report["sha256"] = write_snapshot(save.snapshot, staging / file_name(rank), rank=rank, step=save.step)
    except OSError as error:
        report["errno"] = error.errno
    except Exception as error:
        report["error"] = repr(error)
    return report


def commit(staging: Path, save: Save, reports: list[dict[str, Any]]) -> None:
    """The driver's last part. Before its rename there is no checkpoint, after it there is a complete one."""
    try:
        files = _all_written(staging, reports)
        reach("save/before-manifest", rank=DRIVER, step=save.step)
        manifest = Manifest(manifests.FORMAT, save.step, save.progress, save.layout, made_with(), files)
        _write_manifest(staging / manifests.FILE_NAME, manifest)
        places.publish(staging, save.step)
    except OSError as error:
        places.discard(staging)
        num_bytes = sum(report["num_bytes"] for report in reports)
        raise _refused(staging.parent, save.step, error, num_bytes) from error
    except Exception:
        places.discard(staging)
        raise
    try:
        places.retain(staging.parent, save.keep, save.best_step, save.step)
    except OSError as error:
        raise StorageError(
            "MRL-7006",
            f"the checkpoint of step {save.step} is safe, but older ones cannot be removed: {error.strerror}.\n"
            f"Check the permissions of {_short(staging.parent)}, then run the same command again.",
        ) from error


def _all_written(staging: Path, reports: list[dict[str, Any]]) -> list[FileRecord]:
    """The ranks' files; raises the first error that a rank reported."""
    files = []
    for rank, report in enumerate(reports):
        name = file_name(rank)
        if "errno" in report:
            raise OSError(report["errno"], os.strerror(report["errno"]), name)
        if "error" in report:
            raise RuntimeError(f"{name} was not written: {report['error']}")
        if (staging / name).stat().st_size != report["num_bytes"]:
            raise OSError(errno.EIO, "not all of it reached the disk", name)
        files.append(FileRecord(name, report["num_bytes"], report["sha256"]))
    return files


def _write_manifest(path: Path, manifest: Manifest) -> None:
    with open(path, "xb") as file:
        file.write(manifest.render())
        file.flush()
        reach("save/manifest-written", rank=DRIVER, step=manifest.step)
        os.fsync(file.fileno())
    reach("save/manifest-synced", rank=DRIVER, step=manifest.step)


def made_with() -> dict[str, Any]:
    versions = {package: version(package) for package in ("megarl", "megatron-core", "torch")}
    return {**versions, "num_threads": torch.get_num_threads()}


def _refused(directory: Path, step: int, error: OSError, num_bytes: int) -> StorageError:
    free = _free_bytes(directory)
    file = f"{Path(error.filename).name}: " if error.filename else ""
    hint = (
        "If ranks run on several machines, run.dir must be on a disk that all of them share."
        if error.errno == errno.ENOENT
        else "Free some space or check permissions; the same command continues from the newest checkpoint."
    )
    return StorageError(
        "MRL-7004",
        f"the checkpoint of step {step} could not be written: {file}{error.strerror}.\n"
        f"It needs {num_bytes:,} bytes; {_short(directory)} has {free} free. Earlier checkpoints are as they were.\n"
        + hint,
    )


def _short(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"


def _free_bytes(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free:,}"
    except OSError:
        return "an unknown number"
