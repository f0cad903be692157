"""An engine's memory as parts of the phase table."""

from __future__ import annotations

from typing import Protocol

from megarl.core.protocols import Engine, EnginePart, Servers
from megarl.core.world import World


class MeasuredEngine(Engine, Protocol):
    """An engine that tells how much memory it takes."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights now."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool now."""


class EngineMemory:
    """One part of an engine. Released weights are not kept anywhere: the next push brings newer ones."""

    def __init__(self, engine: MeasuredEngine, part: EnginePart) -> None:
        self._engine = engine
        self._part = part
        self.resident = True

    def offload(self) -> None:
        """Give the memory back."""
        self._engine.release(self._part)
        self.resident = False

    def onload(self) -> None:
        """Take the memory again."""
        self._engine.resume(self._part)
        self.resident = True

    @property
    def num_bytes(self) -> int:
        """Bytes that the part takes now."""
        return self._engine.weight_bytes if self._part == "weights" else self._engine.kv_bytes


class ServerMemory:
    """One part of all servers, which the driver asks to make room; other ranks have no fleet, and wait for it: a server
    may be on any rank's device.
    """

    def __init__(self, servers: Servers | None, part: EnginePart, world: World) -> None:
        self._servers = servers
        self._part: EnginePart = part
        self._world = world
        self.resident = True

    def offload(self) -> None:
        """Let them give the memory back. Collective."""
        if self._servers is not None:
            self._servers.release([self._part])
        self._world.barrier()  # nobody takes the memory before
        self.resident = False

    def onload(self) -> None:
        """Let them take it again. Collective."""
        self._world.barrier()  # everybody has made room
        if self._servers is not None:
            self._servers.resume([self._part])
        self.resident = True

    @property
    def num_bytes(self) -> int:
        """Unknown: it is other processes' memory."""
        return 0
