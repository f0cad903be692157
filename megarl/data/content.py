"""What a data file holds, as one number, and whether it still holds it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megarl.core.errors import DataError


def content_hash(path: Path) -> str:
    """SHA-256 of the file's bytes, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileContent:
    """A file as it was when it was opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()  # first: a change while we read must show as one
        self.sha256 = content_hash(path)

    def require_same(self) -> None:
        """Cheap unless the file was touched; then its content is compared."""
        stamp = self._read_stamp()
        if stamp != self._stamp:
            if content_hash(self._path) != self.sha256:
                raise self.changed(str(self._path))
            self._stamp = stamp

    def changed(self, where: str) -> DataError:
        """The error for a row that is not what it was."""
        return DataError("MRL-2005", f"{where}\nThe file was changed while the run was using it.")

    def _read_stamp(self) -> tuple[int, int, int]:
        status = self._path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ino
