"""Which device is whose: every device of the run has one number, wherever it is.

``node_rank * devices_per_node + index on the node``, from the *physical* index: two jobs that each see only half of a
node's GPUs do not both call theirs 0. Memory is reported under this number, so one full device is never averaged away.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megarl.core.device import device_memory, device_name, physical_index
from megarl.core.peak import peak_tflops
from megarl.core.world import Place, World


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One rank's device. ``tp`` to ``dp`` are the rank's coordinates in the policy's layout."""

    device: int
    rank: int
    node: int
    hostname: str
    local_index: int
    name: str
    uuid: str
    total_gib: float
    # 1e12 operations per second; None if nobody knows
    peak_tflops: float | None
    tp: int
    pp: int
    cp: int
    dp: int


def number_devices(nodes_of: Sequence[str], indices: Sequence[int]) -> list[Place]:
    """The place of every rank, from the names of the ranks' nodes and the devices' physical indices there."""
    nodes = {name: node for node, name in enumerate(dict.fromkeys(nodes_of))}
    per_node = max(indices) + 1
    return [Place(nodes[name] * per_node + index, nodes[name]) for name, index in zip(nodes_of, indices, strict=True)]


def meet_devices(world: World, known_peak: float | None) -> tuple[World, list[DeviceRow]]:
    """The world with its devices numbered, and their table, on every rank. Collective.

    ``known_peak`` (1e12 operations per second) saves looking the device up, or measuring it.
    """
    world.barrier()  # so that ranks on one machine measure at the same time, as they will work
    name, uuid = device_name(world.device)
    index = physical_index(world.device, world.local_rank)
    own: dict[str, Any] = {
        "rank": world.rank,
        "hostname": socket.gethostname(),
        "node_key": f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}",
        "local_index": index,
        "name": name,
        "uuid": uuid,
        "total_gib": device_memory(world.device),
        "peak_tflops": known_peak if known_peak is not None else peak_tflops(world.device, name),
        **{axis: getattr(world, axis).rank for axis in ("tp", "pp", "cp", "dp")},
    }
    ranks = world.gather(own)
    table = []
    if ranks is not None:
        # Hosts may share a name (containers); the launcher's number of the node tells them apart where there is one.
        places = number_devices([rank.pop("node_key") for rank in ranks], [rank["local_index"] for rank in ranks])
        table = [{**place._asdict(), **rank} for place, rank in zip(places, ranks, strict=True)]
    rows = [DeviceRow(**row) for row in world.broadcast(table)]
    return replace(world, places=tuple(Place(row.device, row.node) for row in rows)), rows


def table_tree(rows: Sequence[DeviceRow]) -> list[dict[str, Any]]:
    """The table as plain data, for ``devices.json`` and trackers."""
    return [asdict(row) for row in rows]
