"""Which prompts come next: a shuffled walk over the data set that can stop and go on anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megarl.core.errors import ConfigError
from megarl.core.seeding import derive_seed


class Cursor:
    """An endless stream of item indices, epoch after epoch.

    Every item occurs exactly once per epoch. The stream is a pure function of (num_items, seed, shuffle); how it is cut
    into takes, and whether the process was restarted in between, changes nothing. The only state is how many items were
    taken.
    """

    def __init__(self, num_items: int, seed: int, shuffle: bool = True) -> None:
        if num_items < 1:
            raise ValueError(f"a cursor needs at least one item, not {num_items}")
        self._num_items = num_items
        self._seed = seed
        self._shuffle = shuffle
        self._num_taken = 0
        self._order_of: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._num_taken // self._num_items

    def take(self, num_items: int) -> list[int]:
        """The next ``num_items`` indices; a take may reach over the end of an epoch."""
        taken: list[int] = []
        while len(taken) < num_items:
            start = self._num_taken % self._num_items
            part = self._order(self.epoch)[start : start + num_items - len(taken)].tolist()
            taken += part
            self._num_taken += len(part)
        return taken

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"num_taken": self._num_taken, **self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Refused when the stream would be another one."""
        changed = [
            f"{key}: was {state.get(key)}, is {value}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if changed:
            raise ConfigError(
                "MRL-1404",
                f"the order of the training data changed since the checkpoint ({'; '.join(changed)}).\n"
                "Resume with the same data, seed and shuffling, or start a new run.",
            )
        self._num_taken = int(state["num_taken"])

    def _identity(self) -> dict[str, Any]:
        return {"num_items": self._num_items, "seed": self._seed, "shuffle": self._shuffle}

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The permutation of one epoch; kept until another epoch is asked for."""
        if self._order_of is None or self._order_of[0] != epoch:
            if self._shuffle:
                generator = np.random.default_rng(derive_seed(self._seed, "prompt order", epoch))
                order = generator.permutation(self._num_items)
            else:
                order = np.arange(self._num_items)
            self._order_of = (epoch, order)
        return self._order_of[1]
