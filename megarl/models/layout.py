"""How one model is laid out over the ranks.

Megatron-Core keeps the process groups of *the* layout in module globals. Here every model may have its own: a `Layout`
remembers the globals that Megatron made for it, and puts them in place for as long as its model works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from megatron.core import parallel_state

from megarl.config.parallel import ParallelSettings
from megarl.core.world import World


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to cut a model, and this rank's place in it."""

    parallel: ParallelSettings
    # the ranks of the run, with the axes of this layout
    world: World
    groups: Mapping[str, Any]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block Megatron's groups are this layout's. Blocks may nest."""
        before = megatron_globals()
        vars(parallel_state).update(self.groups)
        try:
            yield
        finally:
            vars(parallel_state).update(before)

    def chunk_layers(self, num_layers: int) -> list[list[range]]:
        """``[stage][chunk]``: which layers are there. Chunks alternate between the stages, as the schedule does."""
        counts = self.parallel.layers_of_stages(num_layers)
        ends = list(accumulate(counts))
        layers = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return [layers[stage :: self.parallel.pp_size] for stage in range(self.parallel.pp_size)]

    @property
    def local_chunks(self) -> range:
        """The model chunks of this rank."""
        return range(self.parallel.vpp_size)

    def is_first(self, chunk: int) -> bool:
        """Whether this rank's ``chunk`` begins with the embedding."""
        return self.world.pp.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether this rank's ``chunk`` ends with the output layer."""
        return self.world.is_last_stage and chunk == self.parallel.vpp_size - 1


def megatron_globals() -> dict[str, Any]:
    """The layout that Megatron has now."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}
