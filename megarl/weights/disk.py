"""The road over a disk that both sides see: a Hugging Face directory for each version.

Files are written bucket by bucket while the engines still serve. A version's directory appears whole or not at all; a
manifest with the sha256 of every file lies in it, which megarl's own engines check before they take anything.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.core.bucket import NamedTensor, num_bytes
from megarl.core.errors import StorageError
from megarl.core.version_directory import INDEX, MANIFEST
from megarl.weights.road import Server, of_each, update_options

BUCKET_BYTES = 64 * 2**20
_TYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PREFIX, _UNFINISHED = "version_", ".unfinished-"


class DiskRoad:
    """Writes ``directory/version_N/``; only rank 0 has one. ``config`` is the model's config.json."""

    streams = False

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        timeout_seconds: float = 600.0,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_seconds = timeout_seconds
        self._directory = directory.resolve()
        self._config = config
        self._staging: Path | None = None
        self._files: dict[str, dict[str, Any]] = {}
        self._file_of: dict[str, str] = {}
        self._num_bytes = 0
        self._version: Path | None = None

    def load(self, bucket: Sequence[NamedTensor], _: Sequence[Server]) -> None:
        """Write the bucket's file and wait until it is on the disk."""
        try:
            if self._staging is None:
                self._begin()
            assert self._staging is not None
            name = f"model-{len(self._files) + 1:05d}.safetensors"
            self._files[name] = _write_tensors(self._staging / name, bucket)
            self._file_of |= {tensor: name for tensor, _ in bucket}
            self._num_bytes += num_bytes(bucket)
        except OSError as error:
            raise self._refused(error) from error

    async def carry(self, _: None, servers: Sequence[Server], version: str | None) -> None:
        """Nothing but with the last bucket: then the directory appears, and all servers read it."""
        if version is None:
            return
        try:
            directory = self._publish(version)
        except OSError as error:
            raise self._refused(error) from error
        # SGLang would read again in the way in which it was started, which may be not at all
        body = {"model_path": str(directory), "load_format": "auto", **update_options(version)}
        calls = [server.control("/update_weights_from_disk", body, self.timeout_seconds) for server in servers]
        await of_each(servers, "the update from disk", calls)

    async def close(self, servers: Sequence[Server]) -> None:
        """Remove what is not finished; and, if somebody has taken this version, all others."""
        published, self._version, self._staging = self._version, None, None
        self._files, self._file_of, self._num_bytes = {}, {}, 0
        for path in self._directory.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)
        if published is not None and any(server.problem is None for server in servers):
            for path in self._directory.glob(f"{_PREFIX}*"):
                if path != published:
                    shutil.rmtree(path, ignore_errors=True)

    def _begin(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._staging = self._directory / f"{_UNFINISHED}{secrets.token_hex(4)}"
        self._staging.mkdir()

    def _publish(self, version: str) -> Path:
        staging = self._staging
        assert staging is not None, "files were written"
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._file_of}
        _write_synced(staging / "config.json", _json(self._config))
        _write_synced(staging / INDEX, _json(index))
        _write_synced(staging / MANIFEST, _json({"version": int(version), "files": self._files}))
        _sync_directory(staging)
        target = self._directory / f"{_PREFIX}{version}"
        if target.exists():  # the same version, pushed again
            target.rename(self._directory / f"{_UNFINISHED}{secrets.token_hex(4)}")
        staging.rename(target)
        _sync_directory(self._directory)
        self._version = target
        return target

    def _refused(self, error: OSError) -> StorageError:
        free = "an unknown number of"
        if self._directory.exists():
            free = f"{shutil.disk_usage(self._directory).free:,}"
        hint = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check its permissions"
        return StorageError(
            "MRL-7007",
            f"weights for the engines cannot be written to {self._directory}: {error.strerror or error}. "
            f"{self._num_bytes:,} bytes were written, {free} bytes are free.\n"
            f"{hint}, or choose another weights.directory; one version of the weights must fit beside the last.",
        )


def _write_tensors(path: Path, tensors: Sequence[NamedTensor]) -> dict[str, Any]:
    """A safetensors file: the header's length, the header, and the tensors' bytes in its order. What it has become."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    size = 0
    with path.open("xb") as file:
        parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
        for part in [*parts, *(_bytes_of(tensor) for _, tensor in tensors)]:
            digest.update(part)
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return {"num_bytes": size, "sha256": digest.hexdigest()}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """Of a copy: torch never again resizes a storage that numpy saw, and the trainer's have to be offloaded."""
    return tensor.detach().to("cpu", copy=True).reshape(-1).view(torch.uint8).numpy().tobytes()


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
