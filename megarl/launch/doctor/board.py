"""Where ranks leave what they found before they try anything that may fail or hang: the store at which they meet."""

from __future__ import annotations

import json
import time
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store


class Board:
    """Notes of ranks to each other, as JSON. Where the store is gone every method raises a RuntimeError of torch's."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = PrefixStore("doctor", store)
        self._rank = rank

    def leave(self, kind: str, note: Any) -> None:
        """One note of this rank's."""
        self._store.set(f"{kind}/{self._rank}", json.dumps(note))

    def collect(self, kind: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        """The notes of these ranks that came in time."""
        names = {rank: f"{kind}/{rank}" for rank in ranks}
        self._wait(list(names.values()), seconds)
        there = [rank for rank, name in names.items() if self._store.check([name])]
        return {rank: json.loads(self._store.get(names[rank])) for rank in there}

    def decide(self, question: str, verdict: bool) -> None:
        """Whether all ranks do this next: the driver's word."""
        self._store.set(f"whether/{question}", json.dumps(verdict))

    def hear(self, question: str, seconds: float) -> bool:
        """The driver's word. A `TimeoutError` if it does not come."""
        name = f"whether/{question}"
        if not self._wait([name], seconds):
            raise TimeoutError("rank 0 does not answer any more")
        return bool(json.loads(self._store.get(name)))

    @property
    def mesh(self) -> Store:
        """For torch.distributed, which leaves notes of its own."""
        return PrefixStore("mesh", self._store)

    def _wait(self, names: list[str], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        try:
            self._store.wait(names, timedelta(seconds=max(0.1, seconds)))
            return True
        except RuntimeError:  # a time-out, unless the store is gone
            if time.monotonic() < deadline:
                raise
            return False
