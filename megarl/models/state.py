"""What of a model has to survive a restart, as slices of tensors that have the same name in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megarl.core.slices import Box, Slice
from megarl.core.world import World
from megarl.models.cuts import Parameter
from megarl.models.decoder import Decoder
from megarl.models.hf_weights import axis_of, named_parameters, own_entries
from megarl.models.optim import Shard, Trainable

_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingState:
    """Main weights and moments of a model that learns: every data-parallel rank saves the part that it updates."""

    def __init__(self, role: str, trainable: Trainable) -> None:
        self._role = role
        self._trainable = trainable
        model = trainable.model
        self._world = model.layout.world
        self._entries = {(entry.chunk, entry.name): entry for entry in own_entries(model.table, self._world)}

    def slices(self) -> list[Slice]:
        """This rank's share of the state, none of it saved by another rank as well."""
        return [
            part for entry, shard in self._shards() if _is_saved(entry, self._world) for part in self._of(entry, shard)
        ]

    def state(self) -> dict[str, Any]:
        """The rest. The learning rate follows from the number of steps."""
        return {"num_updates_done": self._trainable.num_updates_done}

    def make_room(self, state: dict[str, Any]) -> list[Slice]:
        """Moments of the right size on this rank, and every slice that it needs: copies of saved parts, too."""
        self._trainable.resume(int(state["num_updates_done"]))
        return [part for entry, shard in self._shards() for part in self._of(entry, shard)]

    def restored(self) -> None:
        """Give all ranks the restored weights. Collective."""
        with self._trainable.model.layout.active():
            self._trainable.publish_main_weights()

    def _shards(self) -> Iterator[tuple[Parameter, Shard]]:
        for shard in self._trainable.shards():
            yield self._entries[shard.chunk, shard.name], shard

    def _of(self, entry: Parameter, shard: Shard) -> Iterator[Slice]:
        tensors = {"weight": shard.main, **{key: shard.state[key] for key in _MOMENTS if key in shard.state}}
        for kind, tensor in tensors.items():
            for box, start in _boxes(entry, self._world):
                first, last = max(start, shard.start), min(start + box.num_elements, shard.end)
                if first < last:
                    memory = tensor.detach().view(-1)[first - shard.start : last - shard.start]
                    named = replace(box, name=f"{self._role}/{kind}/{box.name}")
                    yield Slice(named, first - start, last - start, memory)


class FrozenState:
    """The weights of a model that does not learn. One data-parallel replica saves them for all."""

    def __init__(self, role: str, model: Decoder) -> None:
        self._role = role
        self._model = model
        self._world = model.layout.world

    def slices(self) -> list[Slice]:
        """This rank's share of the weights, none of it saved by another rank as well."""
        return [
            part
            for entry in own_entries(self._model.table, self._world)
            if _is_saved(entry, self._world) and _is_first_copy(entry, self._world)
            for part in self._of(entry)
        ]

    def make_room(self) -> list[Slice]:
        """Every slice that this rank needs."""
        return [part for entry in own_entries(self._model.table, self._world) for part in self._of(entry)]

    def _of(self, entry: Parameter) -> Iterator[Slice]:
        memory = named_parameters(self._model.chunks)[entry.chunk, entry.name].detach().view(-1)
        for box, start in _boxes(entry, self._world):
            if box.num_elements:
                named = replace(box, name=f"{self._role}/weight/{box.name}")
                yield Slice(named, 0, box.num_elements, memory[start : start + box.num_elements])


def _boxes(entry: Parameter, world: World) -> Iterator[tuple[Box, int]]:
    """What this rank's parameter consists of, and where in its memory each box starts."""
    axis = axis_of(entry, world)
    start = 0
    for box in entry.boxes(axis.rank, axis.size):
        yield box, start
        start += box.num_elements


def _is_saved(entry: Parameter, world: World) -> bool:
    """Of parameters that several ranks hold whole, one saves: the first tensor-parallel rank, the first stage."""
    return entry.exported and (entry.cut.split_dim is not None or axis_of(entry, world).rank == 0)


def _is_first_copy(entry: Parameter, world: World) -> bool:
    if entry.ep_rank is not None:
        return world.edp.rank == 0
    return world.dp.rank == 0 and world.cp.rank == 0
