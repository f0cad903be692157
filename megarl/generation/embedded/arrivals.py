"""Weights that another process left for the engine: in its shared memory, or in files. Nothing of it is trusted."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from megarl.core.bucket import BadManifest, NamedTensor, read_pieces, unpack
from megarl.core.version_directory import read_manifest

_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")
_MEMORY_FILE = "/memfd:megarl-weights"
# a sender has two buffers, and makes new ones for tensors that do not fit
_MAX_MAPPED = 4
_READ_BYTES = 1 << 20


class MappedFiles:
    """Memory files of a sender on this machine, mapped once and read many times."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[str, int], torch.Tensor] = {}

    def tensors(self, manifest: Any) -> list[NamedTensor]:
        """The pieces of a bucket as views of the sender's memory: to be copied before the sender is answered."""
        if not isinstance(manifest, Mapping) or manifest.keys() != {"path", "num_bytes", "pieces"}:
            raise BadManifest("a manifest must have path, num_bytes and pieces")
        flat = self._map(manifest["path"])
        return unpack(read_pieces(manifest["pieces"], len(flat)), flat)

    def clear(self) -> None:
        """Let go of all of them."""
        self._mapped.clear()

    def _map(self, path: Any) -> torch.Tensor:
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise BadManifest("path must be /proc/PID/fd/N, an open memory file of the sender")
        if not os.readlink(path).startswith(_MEMORY_FILE):
            raise BadManifest(f"{path} is not a memory file of megarl's")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            key = (path, status.st_ino)
            if key not in self._mapped:
                # one that shrinks while it is read would end this process
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or status.st_uid != os.geteuid():
                    raise BadManifest(f"{path} is not sealed, or another user's")
                if len(self._mapped) >= _MAX_MAPPED:
                    self._mapped.clear()
                self._mapped[key] = _bytes_of(mmap.mmap(file, status.st_size, prot=mmap.PROT_READ))
            return self._mapped[key]
        finally:
            os.close(file)


def _bytes_of(mapping: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it must not be written to, which nobody does
        return torch.frombuffer(mapping, dtype=torch.uint8)


class VersionFiles:
    """The files of one version's directory, opened once: what is verified is what is read, and no link is followed."""

    def __init__(self, path: str) -> None:
        directory = Path(path)
        if not directory.is_absolute() or directory.is_symlink():
            raise ValueError("model_path must be the absolute path of a directory, not a link")
        self._files = {file.name: file for file in read_manifest(directory)}
        self._open: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            inside = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, inside)
            undo = stack.enter_context(contextlib.ExitStack())
            undo.callback(self._close)
            for name in self._files:
                self._open[name] = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
            undo.pop_all()

    def __enter__(self) -> VersionFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    @property
    def names(self) -> list[str]:
        """The files' names."""
        return list(self._files)

    def verify(self) -> None:
        """Compare every file with the manifest. Raises `ValueError`."""
        for name, file in self._files.items():
            status = os.fstat(self._open[name])
            if not stat.S_ISREG(status.st_mode) or status.st_size != file.num_bytes:
                raise ValueError(f"{name} has {status.st_size} bytes; the manifest says {file.num_bytes}")
            digest, offset = hashlib.sha256(), 0
            while part := os.pread(self._open[name], _READ_BYTES, offset):
                digest.update(part)
                offset += len(part)
            if digest.hexdigest() != file.sha256:
                raise ValueError(f"{name} is damaged: its sha256 is not the manifest's")

    def read(self, name: str) -> list[NamedTensor]:
        """The tensors of one file."""
        data = bytearray()
        while part := os.pread(self._open[name], _READ_BYTES, len(data)):
            data += part
        try:
            return list(load(bytes(data)).items())
        except SafetensorError as error:
            raise ValueError(f"{name} is not a safetensors file: {error}") from None

    def _close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
