"""A checkpoint that is being read: in the layout it was saved in, or in any other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from megarl.checkpoint import directory as places
from megarl.checkpoint.geometry import Overlap, overlaps, rectangles
from megarl.checkpoint.manifest import Damage, Manifest, read_manifest, verify_file
from megarl.checkpoint.rank_file import STATE_PREFIX, Piece, dtype_name, file_name, read_pieces
from megarl.core import whereabouts
from megarl.core.errors import DataError, MissingInputError, StorageError
from megarl.core.slices import Box, Slice

_MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class _Copy:
    """Some elements of a piece that go into a slice; without overlaps the whole piece is the whole slice."""

    piece: Piece
    target: torch.Tensor
    parts: list[Overlap] | None


class Checkpoint:
    """One checkpoint. A file is verified before it is first opened, unless that has been done already."""

    def __init__(self, path: Path, manifest: Manifest, rank: int | None, *, is_verified: bool) -> None:
        """``rank`` is the reader's: if it wrote everything that it wants to read, other files stay closed."""
        self._path = path
        self._manifest = manifest
        self._rank = rank if rank is not None and rank < len(manifest.files) else None
        self._unverified = set() if is_verified else {record.name for record in manifest.files}
        self._pieces_of: dict[str, list[Piece]] = {}
        self._by_name: dict[str, list[Piece]] = {}
        # Who reads tensors one by one comes back to the same files: they stay open, but not all of thousands.
        self._handles: dict[str, Any] = {}

    @property
    def step(self) -> int:
        """The number of completed steps, as the run counted them."""
        return self._manifest.step

    @property
    def progress(self) -> dict[str, Any]:
        """What the driver saved as plain data."""
        return self._manifest.progress

    @property
    def layout(self) -> dict[str, int]:
        """The number of ranks and the sizes of the parallel dimensions that it was saved with."""
        return self._manifest.layout

    @property
    def made_with(self) -> dict[str, Any]:
        """Versions and number of threads; the same bits can be expected only with the same ones."""
        return self._manifest.made_with

    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted(self._all_pieces())

    def read(self, name: str) -> torch.Tensor:
        """One tensor, whole."""
        pieces = self._all_pieces().get(name)
        if not pieces:
            raise self._unfit(f"{name}: the checkpoint has no such tensor")
        whole_shape = pieces[0].box.whole_shape
        box = Box(name, whole_shape, (0,) * len(whole_shape), whole_shape)
        dtype = self._opened(pieces[0].file).get_slice(pieces[0].key)[:0].dtype
        flat = torch.empty(box.num_elements, dtype=dtype)
        self._fill([Slice(box, 0, box.num_elements, flat)])
        return flat.view(whole_shape)

    def fill(self, slices: Sequence[Slice]) -> None:
        """Put the saved values into the slices' memory.

        Nothing is written unless every element of every slice is found. Beside the slices there is no copy: files are
        mapped, and what one rank held of one box is read at a time.
        """
        self._fill(slices)
        self._close_files()

    def rank_state(self, rank: int) -> dict[str, torch.Tensor] | None:
        """The small tensors that a rank saved for itself; None if there was no such rank."""
        if rank >= len(self._manifest.files):
            return None
        file = self._opened(file_name(rank))
        keys = [key for key in file.keys() if key.startswith(STATE_PREFIX)]  # noqa: SIM118  (not a dict)
        state = {key.removeprefix(STATE_PREFIX): file.get_tensor(key).clone() for key in keys}
        self._close_files()
        return state

    @torch.no_grad()
    def _fill(self, slices: Sequence[Slice]) -> None:
        by_file: dict[str, list[_Copy]] = defaultdict(list)
        for copy in self._plan(slices):
            by_file[copy.piece.file].append(copy)
        for name, copies in by_file.items():
            file = self._opened(name)
            for copy in copies:
                whereabouts.tick()
                saved = file.get_tensor(copy.piece.key)
                if copy.parts is None:
                    copy.target.copy_(saved)
                    continue
                for part in copy.parts:
                    part.of_target(copy.target).copy_(part.of_source(saved))

    def _plan(self, slices: Sequence[Slice]) -> Iterator[_Copy]:
        """In the layout of the save, most slices are, as they are, in the file that this rank wrote; only for the rest
        are the indices of the other files needed.
        """
        own = self._pieces(file_name(self._rank)) if self._rank is not None else []
        own_pieces = {(piece.box, piece.start, piece.end): piece for piece in own}
        for wanted in slices:
            piece = own_pieces.get((wanted.box, wanted.start, wanted.end))
            yield from self._plan_one(wanted, [piece] if piece else self._all_pieces().get(wanted.box.name, []))

    def _plan_one(self, wanted: Slice, pieces: Sequence[Piece]) -> list[_Copy]:
        if not pieces:
            raise self._unfit(f"{wanted.box.name}: the checkpoint has no such tensor")
        for piece in pieces:
            self._require_same_kind(wanted, piece)
            if (piece.box, piece.start, piece.end) == (wanted.box, wanted.start, wanted.end):
                return [_Copy(piece, wanted.tensor, None)]
        plan = []
        is_found = torch.zeros(wanted.end - wanted.start, dtype=torch.bool)
        targets = rectangles(wanted.box, wanted.start, wanted.end)
        for piece in pieces:
            parts = list(overlaps(rectangles(piece.box, piece.start, piece.end), targets))
            for part in parts:
                part.of_target(is_found).fill_(True)
            if parts:
                plan.append(_Copy(piece, wanted.tensor, parts))
        num_missing = int((~is_found).sum())
        if num_missing:
            raise self._unfit(
                f"{wanted.box.name}: {num_missing} of {len(is_found)} elements of the part at {wanted.box.offset} "
                "are in no file"
            )
        return plan

    def _require_same_kind(self, wanted: Slice, piece: Piece) -> None:
        name, dtype = wanted.box.name, dtype_name(wanted.tensor.dtype)
        if piece.box.whole_shape != wanted.box.whole_shape:
            raise self._unfit(f"{name}: saved with shape {piece.box.whole_shape}, wanted {wanted.box.whole_shape}")
        if piece.dtype != dtype:
            raise self._unfit(f"{name}: saved as {piece.dtype}, wanted {dtype}")

    def _unfit(self, what: str) -> DataError:
        return DataError(
            "MRL-2802",
            f"the checkpoint of step {self.step} does not fit this run. {what}.\n"
            "A run continues with the model, the optimizer and the precision that it was started with.\n"
            "Undo the change of the configuration, or train into another run directory.",
        )

    def _all_pieces(self) -> dict[str, list[Piece]]:
        if not self._by_name:
            for record in self._manifest.files:
                for piece in self._pieces(record.name):
                    self._by_name.setdefault(piece.box.name, []).append(piece)
        return self._by_name

    def _pieces(self, name: str) -> list[Piece]:
        if name not in self._pieces_of:
            self._pieces_of[name] = read_pieces(name, self._opened(name))
        return self._pieces_of[name]

    def _opened(self, name: str) -> Any:
        if name not in self._handles:
            self._verify(name)
            if len(self._handles) == _MAX_OPEN_FILES:
                del self._handles[next(iter(self._handles))]
            self._handles[name] = safe_open(self._path / name, framework="pt")
        return self._handles[name]

    def _close_files(self) -> None:
        """A resumed run may hold this object to its end: mapped files would count as its memory, and take their space
        on the disk after their checkpoint has been removed.
        """
        self._handles.clear()

    def _verify(self, name: str) -> None:
        if name not in self._unverified:
            return
        try:
            verify_file(self._path, next(record for record in self._manifest.files if record.name == name))
        except Damage as damage:
            raise damaged(self.step, str(damage)) from None
        except OSError as error:
            raise unreadable(self._path.parent, error) from error
        self._unverified.remove(name)


def open_checkpoint(directory: Path, step: int | None) -> Checkpoint:
    """The checkpoint of a step (the newest one for None), for a reader that is no rank of a run.

    ``directory`` holds the checkpoints of a run. Nothing in it is changed.
    """
    there = places.steps_present(directory)
    wanted = places.newest_step(directory) if step is None else step
    if wanted not in there:
        listed = f"There are: {', '.join(map(str, there))}." if there else "There is none yet."
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise MissingInputError("MRL-4201", f"{directory} has {what}.\n{listed}")
    path = places.step_directory(directory, wanted)
    try:
        return Checkpoint(path, read_manifest(path, wanted), None, is_verified=False)
    except Damage as damage:
        raise damaged(wanted, str(damage)) from None
    except OSError as error:
        raise unreadable(directory, error) from error


def newest_good_step(directory: Path) -> tuple[int | None, list[str]]:
    """The newest step of which every byte is as it was written, and what is wrong with newer ones. Nothing in
    ``directory`` is changed: a run may be alive in it.
    """
    wrong: list[str] = []
    for step in reversed(places.complete_steps(directory)):
        path = places.step_directory(directory, step)
        try:
            for record in read_manifest(path, step).files:
                verify_file(path, record)
            return step, wrong
        except Damage as damage:
            wrong.append(str(damaged(step, str(damage))))
        except OSError as error:
            raise unreadable(directory, error) from error
    return None, wrong


def damaged(step: int, what: str) -> StorageError:
    """A checkpoint that cannot be used, where nothing older is acceptable instead."""
    return StorageError(
        "MRL-7003", f"the checkpoint of step {step} is damaged: {what}.\nChoose another step; this one is lost."
    )


def unreadable(directory: Path, error: OSError) -> StorageError:
    """The disk did not answer as it should. That says nothing about what is on it, so no checkpoint is given up."""
    return StorageError(
        "MRL-7005",
        f"the checkpoints in {directory.parent.name}/{directory.name} cannot be used: {error.strerror}.\n"
        "Nothing was started. Check the disk and its permissions, then run the same command again.",
    )
