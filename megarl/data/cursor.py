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
    into takes, and whether the process was restarted in between, changes nothing. The only state is how many epochs are
    complete and how many items of the next one were taken.
    """

    def __init__(self, num_items: int, seed: int, shuffle: bool = True) -> None:
        if num_items < 1:
            raise ValueError(f"a cursor needs at least one item, not {num_items}")
        self._num_items = num_items
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order_of: tuple[int, NDArray[np.int64]] | None = None

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._epoch

    def take(self, num_items: int) -> list[int]:
        """The next ``num_items`` indices; a take may reach over the end of an epoch."""
        taken: list[int] = []
        while len(taken) < num_items:
            part = self._order(self._epoch)[self._position : self._position + num_items - len(taken)].tolist()
            taken += part
            self._position += len(part)
            if self._position == self._num_items:
                self._epoch, self._position = self._epoch + 1, 0
        return taken

    def state(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def restore(self, state: dict[str, Any], *, other_rows: bool = False) -> bool:
        """Go on where `state` was taken. Refused when the stream would be another one.

        ``other_rows``: the user accepted that the rows are others. If there are as many as before, the walk goes on
        among them; if not, it begins a new epoch, and this tells so: no place in the old order means anything then.
        """
        identity = self._identity()
        changed = [key for key in identity if state.get(key) != identity[key]]
        begins_anew = other_rows and changed == ["num_items"]
        if changed and not begins_anew:
            listing = "; ".join(f"{key}: was {state.get(key)}, is {identity[key]}" for key in changed)
            raise ConfigError(
                "MRL-1404",
                f"the order of the training data changed since the checkpoint ({listing}).\n"
                "Resume with the same data, seed and shuffling, or start a new run.",
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        if begins_anew and self._position:
            self._epoch, self._position = self._epoch + 1, 0
        return begins_anew

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
