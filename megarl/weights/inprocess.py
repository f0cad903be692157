"""Weight push into an engine that lives in the same process: buckets are handed over, nothing is serialised."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megarl.core.checksum import combine, tensor_checksum
from megarl.core.errors import EngineError
from megarl.core.protocols import Engine
from megarl.core.world import World
from megarl.metrics.meter import Meter

# the trainer's weights by Hugging Face name, bucket by bucket; collective
Export = Callable[[], Iterable[list[tuple[str, torch.Tensor]]]]


class InProcessTransport:
    """Every rank exports the whole model, bucket by bucket, into its own engine."""

    def __init__(self, export: Export, engine: Engine, world: World) -> None:
        self._export = export
        self._engine = engine
        self._world = world

    def push(self, version: int) -> Meter:
        """Give the engine the trainer's weights under ``version``, and prove that they arrived. Collective."""
        meter = Meter()
        sent: list[int] = []
        num_bytes = 0
        self._engine.begin_weight_update()
        for bucket in self._export():
            self._engine.update_weights(bucket)
            sent.extend(tensor_checksum(name, tensor) for name, tensor in bucket)
            num_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
        self._engine.end_weight_update(version)
        self._verify(combine(sent), version)
        if self._world.is_driver:
            meter.last("weights/version", version)
            meter.sum("weights/push_bytes", num_bytes)
        return meter

    def _verify(self, sent: int, version: int) -> None:
        arrived = self._engine.checksum()
        everyone = self._world.gather([self._engine.version, sent, arrived])
        for rank, (served, theirs, got) in enumerate(everyone or []):
            if (served, theirs, got) != (version, sent, sent):
                raise EngineError(
                    "MRL-5120",
                    f"the engine of rank {rank} reports version {served} and checksum {got:x} after the push of "
                    f"version {version} with checksum {sent:x} (rank {rank} sent {theirs:x}).\n"
                    "Nothing was generated from it.",
                )
