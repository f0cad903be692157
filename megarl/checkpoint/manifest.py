"""The manifest of a checkpoint: what it is and how every byte of it can be checked. It is the last file written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megarl.checkpoint.rank_file import file_name
from megarl.core import whereabouts
from megarl.core.errors import DataError

FORMAT = 1
FILE_NAME = "manifest.json"
_CHUNK_BYTES = 4 * 2**20
# what a missing or replaced file answers; other errors (a stale mount, permissions) say nothing about its content
_SIGNS_OF_DAMAGE = (errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)


class Damage(Exception):
    """A checkpoint is not what was written: names the file and says what differs."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One rank's file."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint. ``files[r]`` is the file of rank ``r``."""

    format: int
    step: int
    progress: dict[str, Any]
    # number of ranks and sizes of the parallel dimensions
    layout: dict[str, int]
    # of torch, Megatron-Core and megarl, and the number of threads: all must be equal for equal bits
    made_with: dict[str, Any]
    files: list[FileRecord]

    def render(self) -> bytes:
        """The file. It holds a hash of its other content, so that damage to it shows."""
        return _sealed(asdict(self))


def read_manifest(directory: Path, step: int) -> Manifest:
    """The manifest of the checkpoint of ``step``, or `Damage`. Only a file that is, byte for byte, what `render` would
    make of its content is taken.
    """
    with _opened(directory / FILE_NAME) as file:
        content = file.read()
    try:
        tree = json.loads(content)["manifest"]
        is_intact = _sealed(tree) == content
    except (ValueError, LookupError, TypeError, RecursionError):
        is_intact = False
    if not is_intact:
        raise Damage(f"{FILE_NAME} is not what was written")
    if tree["format"] != FORMAT:
        raise DataError(
            "MRL-2801",
            f"{directory.name} is a checkpoint of format {tree['format']}; this megarl reads format {FORMAT}.\n"
            "Use the version of megarl that wrote it.",
        )
    manifest = manifest_of(tree)
    if manifest.step != step:
        raise Damage(f"{FILE_NAME} is that of step {manifest.step}")
    if [record.name for record in manifest.files] != [file_name(rank) for rank in range(len(manifest.files))]:
        raise Damage(f"{FILE_NAME} names files that are no rank's")
    return manifest


def manifest_of(tree: dict[str, Any]) -> Manifest:
    """The inverse of ``dataclasses.asdict``."""
    return Manifest(**{**tree, "files": [FileRecord(**record) for record in tree["files"]]})


def verify_file(directory: Path, record: FileRecord) -> None:
    """Raise `Damage` unless the file has the recorded size and hash."""
    digest = hashlib.sha256()
    with _opened(directory / record.name) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != record.num_bytes:
            raise Damage(f"{record.name} has {num_bytes} bytes instead of {record.num_bytes}")
        while chunk := file.read(_CHUNK_BYTES):
            whereabouts.tick()
            digest.update(chunk)
    if digest.hexdigest() != record.sha256:
        raise Damage(f"{record.name} has another SHA-256 than its manifest says")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """A file of a checkpoint. Signs of damage are `Damage`, whether they show on opening or on reading."""
    try:
        # A link could lead anywhere, also later on; a pipe would never end.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Damage(f"{path.name} is not a file")
            yield file
    except FileNotFoundError:
        raise Damage(f"{path.name} is missing") from None
    except OSError as error:
        if error.errno not in _SIGNS_OF_DAMAGE:
            raise
        raise Damage(f"{path.name}: {error.strerror}") from error


def _sealed(tree: dict[str, Any]) -> bytes:
    seal = hashlib.sha256(json.dumps(tree, indent=1).encode()).hexdigest()
    return json.dumps({"manifest": tree, "sha256": seal}, indent=1).encode() + b"\n"
