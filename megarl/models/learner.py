"""What every model that learns has: an optimizer, parts that can be offloaded, and a state that can be saved."""

from __future__ import annotations

from typing import Any

from megarl.core.protocols import OffloadPart
from megarl.core.slices import Slice
from megarl.models.decoder import Decoder
from megarl.models.memory import gradients_part, optimizer_part, weights_part
from megarl.models.optim import OptimizerSettings, Trainable, TrainingOptions
from megarl.models.state import TrainingState
from megarl.models.update import Updater


class Learner:
    """``role`` names the model in metrics, in the phase table and in checkpoints. Collective to build."""

    def __init__(self, role: str, model: Decoder, settings: OptimizerSettings, options: TrainingOptions) -> None:
        with model.layout.active():
            self._trainable = Trainable(model, settings, options)
        self._updater = Updater(self._trainable, role)
        self._saved = TrainingState(role, self._trainable)
        self.parts: dict[str, OffloadPart] = {
            f"{role}.weights": weights_part(model.chunks),
            f"{role}.grads": gradients_part(self._trainable),
            f"{role}.optimizer": optimizer_part(self._trainable),
        }

    def slices(self) -> list[Slice]:
        """This rank's share of weights and moments."""
        return self._saved.slices()

    def state(self) -> dict[str, Any]:
        """Counters, equal on all ranks."""
        return {**self._saved.state(), **self._updater.state()}

    def make_room(self, state: dict[str, Any]) -> list[Slice]:
        """Take over a saved state; the returned slices must be filled before `restored`."""
        self._updater.restore(state)
        return self._saved.make_room(state)

    def restored(self) -> None:
        """The slices are filled. Collective."""
        self._saved.restored()
