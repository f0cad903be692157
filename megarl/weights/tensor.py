"""The road inside one machine: buckets lie in shared memory, and servers are told where.

Two buffers take turns: one is filled while servers read the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megarl.core.bucket import SHARED_MEMORY, NamedTensor, lay_out, pack
from megarl.weights.memory_file import MemoryFile
from megarl.weights.road import Server, of_each, update_options
from megarl.weights.sglang_payload import write_payload

# the fastest of those that tools/bench/push_speed.py tries
BUCKET_BYTES = 16 * 2**20


@dataclass(slots=True)
class _Parcel:
    """One bucket, as each server wants it."""

    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)
    # kept until all have answered: handles of GPU memory do not keep it
    tensors: Sequence[NamedTensor] = ()


class TensorRoad:
    """Shared memory to servers on the courier's machine; CUDA handles to SGLang if the weights are on a GPU."""

    streams = True

    def __init__(self, timeout_seconds: float = 120.0, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_seconds = timeout_seconds
        self._buffers: list[MemoryFile] = []

    def load(self, bucket: Sequence[NamedTensor], servers: Sequence[Server]) -> _Parcel:
        """Put the bucket into shared memory."""
        parcel = _Parcel(tensors=bucket)
        embedded = [server for server in servers if server.kind.name == "embedded"]
        if embedded:
            body = self._fill(bucket)
            parcel.bodies |= {server.engine.url: body for server in embedded}
        for server in servers:
            if server.kind.name == "sglang":
                # every rank of the server reads its own
                texts = [write_payload(bucket) for _ in range(server.kind.tp_size)]
                parcel.bodies[server.engine.url] = {"serialized_named_tensors": texts, "load_format": None}
        return parcel

    async def carry(self, parcel: _Parcel, servers: Sequence[Server], version: str | None) -> None:
        """Tell every server where the bucket is, and wait until all have copied it."""
        calls = [
            server.control(
                "/update_weights_from_tensor",
                {**parcel.bodies[server.engine.url], **update_options(version)},
                self.timeout_seconds,
            )
            for server in servers
        ]
        await of_each(servers, "a bucket", calls)

    async def close(self, _: Sequence[Server]) -> None:
        """Give the buffers back."""
        while self._buffers:
            self._buffers.pop().close()

    def _fill(self, bucket: Sequence[NamedTensor]) -> dict[str, Any]:
        """Copy the bucket into the buffer that was not used last; the manifest for it."""
        pieces, num_bytes = lay_out(bucket)
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        if buffer is None or buffer.num_bytes < num_bytes:
            if buffer is not None:
                buffer.close()
            # lay_out rounds every tensor up
            buffer = MemoryFile(max(num_bytes, self.bucket_bytes + self.bucket_bytes // 16))
        self._buffers.append(buffer)
        pack(bucket, pieces, buffer.bytes)
        manifest = {"path": buffer.path, "num_bytes": buffer.num_bytes, "pieces": [piece.tree() for piece in pieces]}
        return {"load_format": SHARED_MEMORY, "manifest": manifest}
