"""Engines that serve the weights they should."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from megarl.metrics.meter import Meter
from megarl.run.residency import Residency

UPDATE = "actor_train/model_update"


class WeightTransport(Protocol):
    """A road from the trainer to the engines."""

    def push(self, version: int) -> Meter:
        """Give every engine the trainer's weights under ``version``. Collective."""


class EngineSync:
    """Pushes weights when somebody is about to generate, not when they change: supervised steps never push."""

    def __init__(
        self, transport: WeightTransport, residency: Residency, someone_lacks_weights: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._residency = residency
        # whether an engine came up, or made room for another model, since the last push; collective
        self._someone_lacks_weights = someone_lacks_weights
        # the weights that were pushed last; None: none yet
        self._pushed_version: int | None = None

    def refresh(self, version: int, meter: Meter) -> None:
        """Make the engines serve ``version``; nothing to do if they already do. Collective."""
        if version == self.served_version():
            return
        with meter.timed("timing_s/update_weights"), self._residency.phase(UPDATE, meter):
            meter.merge(self._transport.push(version))
        self._pushed_version = version

    def served_version(self) -> int | None:
        """The weights that all engines serve; None if one of them has none. Collective."""
        return None if self._pushed_version is None or self._someone_lacks_weights() else self._pushed_version
