"""A server as an engine of this process, for tests and tools that want to wait for answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from megarl.core.engine_fault import EngineFault
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import EnginePart, Generation, GenerationRequest, PauseMode
from megarl.core.version_directory import INDEX, MANIFEST
from megarl.generation.http.client import EngineClient

_UPDATE_SECONDS = 600.0


class HttpEngine:
    """An `Engine` on top of a server. New weights travel through files that the server must be able to read."""

    def __init__(self, remote: EngineClient, model_directory: Path, timeout_seconds: float = 600.0) -> None:
        self._remote = remote
        # holds config.json; SGLang wants it beside the weights
        self._model_directory = model_directory
        self._timeout_seconds = timeout_seconds
        self._thread = LoopThread("http-engine")
        # requests that were paused in place need the cache; all others must not find what old weights computed
        self._keeps_cache = False
        # the files of the running update; None when no update is running
        self._files: Path | None = None
        # parameter -> its file, and what is known of each file
        self._file_of: dict[str, str] = {}
        self._written: dict[str, dict[str, int | str]] = {}

    @property
    def version(self) -> int:
        """The version of the weights that the server says it serves."""
        return self._thread.run(self._remote.version())

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Serve all requests; results in the order of the requests."""
        return self._thread.run(self._generate(requests))

    def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests, or all."""
        self._thread.run(self._remote.abort(ids))

    def pause(self, mode: PauseMode) -> None:
        """Draw nothing until `continue_generation`; new requests wait."""
        self._thread.run(self._remote.pause(mode))
        self._keeps_cache = mode == "in_place"

    def continue_generation(self) -> None:
        """Go on; nothing happens if the engine is not paused."""
        self._thread.run(self._remote.continue_generation())
        self._keeps_cache = False

    def begin_weight_update(self) -> None:
        """Buckets are collected in files from here on."""
        if self._files is not None:
            raise EngineFault("refused", "a weight update is already running")
        self._files = Path(tempfile.mkdtemp(prefix="megarl-weights-"))
        self._file_of, self._written = {}, {}
        shutil.copy(self._model_directory / "config.json", self._files)

    def update_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Write a bucket to a file of its own; nothing of it stays in memory."""
        files = self._running_update()
        bucket = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors}
        data = save(bucket, metadata={"format": "pt"})
        file = f"model-{len(self._written):05d}.safetensors"
        (files / file).write_bytes(data)
        self._written[file] = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self._file_of.update(dict.fromkeys(bucket, file))

    def end_weight_update(self, version: int) -> None:
        """The server reads the files and serves them under their version."""
        files = self._running_update()
        trees = {
            INDEX: {"metadata": {}, "weight_map": self._file_of},
            MANIFEST: {"version": version, "files": self._written},
        }
        for name, tree in trees.items():
            (files / name).write_text(json.dumps(tree), encoding="utf-8")
        body = {
            "model_path": str(files),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": not self._keeps_cache,
        }
        try:
            self._thread.run(self._remote.control("/update_weights_from_disk", body, _UPDATE_SECONDS))
        finally:
            self._files = None
            shutil.rmtree(files, ignore_errors=True)

    def checksum(self) -> int:
        """The checksum of `core.checksum` over every parameter; SGLang has none that can be compared with it."""
        kind = self._thread.run(self._remote.kind())
        if kind.name != "embedded":
            raise EngineFault("refused", "SGLang gives no checksum that can be compared with the trainer's")
        answer = self._thread.run(self._remote.control("/weights_checker", {"action": "checksum"}, _UPDATE_SECONDS))
        try:
            return int(answer["checksum"], 16)
        except (KeyError, TypeError, ValueError):
            raise EngineFault("garbled", "/weights_checker names no checksum") from None

    def release(self, part: EnginePart) -> None:
        """Give the part's memory back. The engine must be idle."""
        self._thread.run(self._remote.release([part]))

    def resume(self, part: EnginePart) -> None:
        """Take the part's memory again; contents are undefined until written."""
        self._thread.run(self._remote.resume([part]))

    def close(self) -> None:
        """End the connections and the thread. The server goes on."""
        self._thread.run(self._remote.close())
        self._thread.close()

    async def _generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        work = [asyncio.create_task(self._remote.generate(request, self._timeout_seconds)) for request in requests]
        try:
            return await asyncio.gather(*work)
        finally:
            # after a failure nobody waits for the others
            for task in work:
                task.cancel()

    def _running_update(self) -> Path:
        if self._files is None:
            raise EngineFault("refused", "no weight update is running")
        return self._files
