"""Who this rank is, and how ranks talk on the control group.

The control group is always gloo: a waiting rank sleeps in a socket read instead of spinning in a GPU kernel. Everything
sent on it goes through `core.wire`, so nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megarl.core import whereabouts, wire

DRIVER = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """One parallel dimension as this rank sees it: its coordinate, the size, and the group of its peers."""

    rank: int
    size: int
    group: dist.ProcessGroup


class Place(NamedTuple):
    """The numbers of a rank's device and of its node in the whole run."""

    device: int
    node: int


@dataclass(frozen=True, slots=True)
class World:
    """All ranks of the run, as one model is laid out over them: models may be laid out differently, and then each has
    its own world over the same ranks. Every method that communicates is a collective: every rank must call it.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    control_group: dist.ProcessGroup
    tp: Axis
    pp: Axis
    # ranks that hold the same part of the model and see different samples
    dp: Axis
    # ranks that share the tokens of every sequence
    cp: Axis
    # how the experts of a sparse model are dealt out: whole ones, parts of one, and copies of the same part
    ep: Axis
    etp: Axis
    edp: Axis
    # data-parallel coordinate of every rank, so that the driver knows whose batch goes where
    dp_rank_of: tuple[int, ...]
    # where every rank is (see `core.device_table`); empty: one node, and a device has its rank's number
    places: tuple[Place, ...] = ()

    @property
    def is_driver(self) -> bool:
        """The driver draws prompts, scores, packs and logs."""
        return self.rank == DRIVER

    @property
    def is_last_stage(self) -> bool:
        """Only the last pipeline stage sees logits and losses."""
        return self.pp.rank == self.pp.size - 1

    @property
    def reports_losses(self) -> bool:
        """Tensor- and context-parallel ranks hold identical losses; exactly one of them reports each."""
        return self.is_last_stage and self.tp.rank == 0 and self.cp.rank == 0

    def barrier(self) -> None:
        """Wait until every rank is here."""
        whereabouts.wait()
        dist.barrier(group=self.control_group)

    def broadcast(self, tree: Any) -> Any:
        """The driver's tree, on every rank."""
        if not self.is_driver:
            whereabouts.wait()
        frame = self._broadcast_frame(wire.encode(tree) if self.is_driver else b"")
        return tree if self.is_driver else wire.decode(frame)

    def scatter(self, trees: Sequence[Any] | None) -> Any:
        """``trees[r]`` of the driver reaches rank ``r``; other ranks pass None."""
        if self.is_driver:
            assert trees is not None and len(trees) == self.size
            for rank in range(self.size):
                if rank != DRIVER:
                    self._send(wire.encode(trees[rank]), rank)
            return trees[DRIVER]
        whereabouts.wait()
        return wire.decode(self._receive(DRIVER))

    def gather(self, tree: Any) -> list[Any] | None:
        """Every rank's tree, in rank order, on the driver; None elsewhere."""
        if not self.is_driver:
            self._send(wire.encode(tree), DRIVER)
            return None
        whereabouts.wait()
        return [tree if rank == DRIVER else wire.decode(self._receive(rank)) for rank in range(self.size)]

    def sum_over_dp(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over data-parallel replicas. Model-parallel peers hold equal values and get equal sums."""
        dist.all_reduce(values, group=self.dp.group)
        return values

    def _broadcast_frame(self, frame: bytes) -> bytes:
        size = torch.tensor([len(frame)], dtype=torch.int64)
        dist.broadcast(size, DRIVER, group=self.control_group)
        buffer = _to_tensor(frame) if self.is_driver else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, DRIVER, group=self.control_group)
        return buffer.numpy().tobytes()

    def _send(self, frame: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(frame)], dtype=torch.int64), rank, group=self.control_group)
        dist.send(_to_tensor(frame), rank, group=self.control_group)

    def _receive(self, rank: int) -> memoryview:
        size = torch.empty(1, dtype=torch.int64)
        dist.recv(size, rank, group=self.control_group)
        buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(buffer, rank, group=self.control_group)
        return memoryview(buffer.numpy().data)


def _to_tensor(frame: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(frame, dtype=np.uint8).copy())
