"""The engines of a run: who they are, which memory they take, and how weights get to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megarl.config.layout import max_sequence_length, model_shape
from megarl.config.schema import RunConfig
from megarl.core.protocols import OffloadPart
from megarl.core.world import World
from megarl.generation.embedded.engine import EmbeddedEngine
from megarl.generation.fleet.inprocess import EmbeddedFleet
from megarl.generation.parts import EngineMemory
from megarl.rollout.serving import InRankServing, ServerServing
from megarl.run.residency import Residency
from megarl.run.roles import run_dtype
from megarl.run.sync import EngineSync
from megarl.weights.inprocess import Export, InProcessTransport


@dataclass(frozen=True, slots=True)
class Connected:
    """What a run that samples needs: engines that answer, and weights in them."""

    serving: InRankServing | ServerServing
    sync: EngineSync


class Engines(Protocol):
    """Engines before they are connected to the trainer."""

    @property
    def parts(self) -> dict[str, OffloadPart]:
        """What they take of the trainer's devices, by the names of the phase table."""

    def connect(self, export: Export, residency: Residency) -> Connected:
        """Make the road from the trainer's weights to them. Collective."""

    def close(self) -> None:
        """End what was started for them."""


class InRankEngines:
    """One embedded engine inside each rank."""

    def __init__(self, config: RunConfig, world: World) -> None:
        self._world = world
        self._engine = EmbeddedEngine(
            model_shape(config),
            config.generation.num_slots,
            max_sequence_length(config),
            world.device,
            run_dtype(config, world.device),
        )

    @property
    def parts(self) -> dict[str, OffloadPart]:
        """See `Engines`."""
        return {
            "engine.weights": EngineMemory(self._engine, "weights"),
            "engine.kv_cache": EngineMemory(self._engine, "kv_cache"),
        }

    def connect(self, export: Export, residency: Residency) -> Connected:
        """See `Engines`."""
        transport = InProcessTransport(export, self._engine, self._world)
        sync = EngineSync(transport, residency, lambda: not self._engine.has_weights)
        fleet = EmbeddedFleet(self._engine, self._world)
        return Connected(InRankServing(fleet, sync.refresh, residency.phase), sync)

    def close(self) -> None:
        """Nothing was started."""
