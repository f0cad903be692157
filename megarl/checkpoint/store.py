"""Saving and finding checkpoints: one commit point for the state of all ranks.

Each rank writes its own file; the driver writes the manifest last and makes everything visible with one rename. See
docs/design/0005-checkpoints.md.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.checkpoint import directory as places
from megarl.checkpoint.commit import Save, commit, stage, write_file
from megarl.checkpoint.directory import newest_step
from megarl.checkpoint.manifest import Damage, FileRecord, Manifest, manifest_of, read_manifest, verify_file
from megarl.checkpoint.rank_file import take_snapshot
from megarl.checkpoint.reading import Checkpoint, newest_good_step, open_checkpoint, unreadable
from megarl.core.errors import DataError, MegarlError, StorageError
from megarl.core.faults import reach
from megarl.core.slices import Slice
from megarl.core.world import Axis, World

__all__ = ["Checkpoint", "CheckpointStore", "newest_good_step", "newest_step", "open_checkpoint"]

# A rank may wait that long for the slowest disk; a dead peer is noticed by its closed socket, not by this.
_TIMEOUT = timedelta(hours=24)
_logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one run. Every method is to be called by all ranks.

    A save runs in a background thread of every rank, on a group of its own, so it never mixes with the loop's
    collectives. One save is in flight at a time. What goes wrong in it is raised by the next `save`, `finish` or
    `open_newest`, on all ranks alike; the store can be used again after that.
    """

    def __init__(self, directory: Path, world: World, keep: int) -> None:
        """``directory`` is on a disk that all ranks share. The newest ``keep`` checkpoints are kept."""
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint has to be kept")
        self._directory = directory
        self._world = replace(world, control_group=dist.new_group(backend="gloo", timeout=_TIMEOUT))
        self._keep = keep
        self._best_step: int | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(
        self,
        step: int,
        slices: Sequence[Slice],
        progress: dict[str, Any],
        rank_state: Mapping[str, torch.Tensor],
        *,
        wait: bool,
    ) -> None:
        """Save the state of all ranks as the checkpoint of ``step``.

        Returns when everything is copied and may change again; with ``wait``, when the checkpoint is committed. A save
        still in flight is waited for. ``progress`` is plain JSON data of the driver (that of other ranks is ignored),
        ``rank_state`` are small tensors that belong to this rank alone.
        """
        self.finish()
        reach("save/snapshot", rank=self._world.rank, step=step)
        # By way of JSON, because the loop goes on to change its own objects.
        plain = json.loads(json.dumps(progress)) if self._world.is_driver else {}
        snapshot = take_snapshot(slices, rank_state)
        save = Save(step, snapshot, plain, _layout(self._world), self._keep, self._best_step)
        # A daemon: when the loop fails, an unfinished save must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(save,), name=f"save-{step}", daemon=True)
        self._thread.start()
        if wait:
            self.finish()

    def retain(self, best_step: int | None) -> None:
        """From the next save on, keep the checkpoint of ``best_step`` too, however old it gets. Not a collective."""
        self._best_step = best_step

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong in the background that nobody has been told yet. Not a collective."""
        return self._error is not None

    def finish(self) -> None:
        """Wait for the save in flight, and raise what went wrong in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def open_newest(self) -> Checkpoint | None:
        """The newest checkpoint of which every byte is as it was written; None if there is none.

        A damaged one is set aside as ``step_NNNNNN.bad``, with a warning, and the one before it is tried.
        """
        self.finish()
        damaged: list[str] = []  # the driver's
        self._on_driver(lambda: places.recover(self._directory))
        while True:
            tree = self._on_driver(lambda: self._newest_manifest(damaged))
            manifest = manifest_of(tree) if tree is not None else None
            if manifest is None or self._is_intact(manifest, damaged):
                break
        instead = f"Step {manifest.step} is used instead." if manifest else "No older one is left."
        for what in damaged:
            _logger.warning("MRL-7003 %s. %s", what, instead)
        if manifest is None:
            return None
        path = places.step_directory(self._directory, manifest.step)
        return Checkpoint(path, manifest, self._world.rank, is_verified=True)

    def _run(self, save: Save) -> None:
        """The background thread."""
        try:
            staging = self._directory / self._on_driver(lambda: stage(self._directory, save))
            reports = self._world.gather(write_file(staging, save, self._world.rank))
            self._on_driver(lambda: commit(staging, save, reports or []))
        except Exception as error:
            self._error = error

    def _newest_manifest(self, damaged: list[str]) -> dict[str, Any] | None:
        """The newest readable manifest, as plain data; what is newer is set aside."""
        for step in reversed(places.steps_present(self._directory)):
            try:
                return asdict(read_manifest(places.step_directory(self._directory, step), step))
            except Damage as damage:
                damaged.append(self._set_aside(step, str(damage)))
        return None

    def _is_intact(self, manifest: Manifest, damaged: list[str]) -> bool:
        """Collective: each rank hashes its share of the files."""
        path = places.step_directory(self._directory, manifest.step)
        reports = self._world.gather(_verify(path, manifest.files[self._world.rank :: self._world.size]))
        return bool(self._on_driver(lambda: self._judge(manifest.step, reports or [], damaged)))

    def _judge(self, step: int, reports: list[dict[str, Any] | None], damaged: list[str]) -> bool:
        found = [report for report in reports if report is not None]
        for report in found:
            if "errno" in report:
                raise OSError(report["errno"], report["error"])
        if found:
            damaged.append(self._set_aside(step, "; ".join(report["error"] for report in found)))
        return not found

    def _set_aside(self, step: int, what: str) -> str:
        kept_as = places.mark_bad(self._directory, step)
        return f"the checkpoint of step {step} is damaged: {what}. It is kept as {kept_as.name}"

    def _on_driver(self, work: Callable[[], Any]) -> Any:
        """Collective: the plain data that ``work`` returns on the driver, or the error that it raises there, on every
        rank.
        """
        error: Exception | None = None
        answer: dict[str, Any] = {}
        if self._world.is_driver:
            try:
                answer = {"value": work()}
            except Exception as caught:
                error = unreadable(self._directory, caught) if isinstance(caught, OSError) else caught
                answer = {"error": str(error), "kind": type(error).__name__}
        answer = self._world.broadcast(answer)
        if "value" in answer:
            return answer["value"]
        raise error if error is not None else _rebuilt(answer["kind"], answer["error"])


def _verify(path: Path, records: Sequence[FileRecord]) -> dict[str, Any] | None:
    """The first file that is not as it was written; errors as data, because other ranks wait for the answer."""
    for record in records:
        try:
            verify_file(path, record)
        except Damage as damage:
            return {"error": str(damage)}
        except OSError as error:
            return {"error": f"{record.name}: {error.strerror}", "errno": error.errno}
    return None


def _layout(world: World) -> dict[str, int]:
    axes = {field.name: getattr(world, field.name) for field in fields(world)}
    return {"num_ranks": world.size} | {name: axis.size for name, axis in axes.items() if isinstance(axis, Axis)}


def _rebuilt(kind: str, text: str) -> Exception:
    """An error of the driver on another rank, such that all ranks end with the same exit code."""
    kinds: dict[str, type[MegarlError]] = {"StorageError": StorageError, "DataError": DataError}
    if kind not in kinds:
        return RuntimeError(f"{kind} on the driver: {text}")
    code, _, message = text.partition(" ")
    return kinds[kind](code, message)
