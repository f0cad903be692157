"""The road between machines: a group of the courier and all ranks of all its servers, which a bucket is broadcast to.

A member that dies breaks the group for everybody. Then it is made anew without that member, and the bucket that was
under way is sent again; buckets before it have arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch

from megarl.core.bucket import NamedTensor, dtype_name
from megarl.core.engine_fault import EngineFault
from megarl.core.errors import EngineError
from megarl.core.update_group import GroupBackend, UpdateGroup, address_towards, is_private, open_store
from megarl.weights.road import Server, live, update_options

# the fastest of those that tools/bench/push_speed.py tries; larger ones overflow what sockets hold
BUCKET_BYTES = 4 * 2**20
_SHORT_SECONDS = 5.0


class BroadcastRoad:
    """gloo between CPUs; NCCL between GPUs, which has not been run yet."""

    streams = True

    def __init__(self, device: torch.device, timeout_seconds: float = 120.0, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_seconds = timeout_seconds
        self._backend: GroupBackend = "nccl" if device.type == "cuda" else "gloo"
        self._group: UpdateGroup | None = None
        self._name = ""
        self._members: list[str] = []
        # holds the meeting point open; engines reach it through the group
        self._store: Any = None

    def load(self, bucket: Sequence[NamedTensor], _: Sequence[Server]) -> list[NamedTensor]:
        """Tensors travel from where they are."""
        return [(name, tensor.detach().contiguous()) for name, tensor in bucket]

    async def carry(self, parcel: list[NamedTensor], servers: Sequence[Server], version: str | None) -> None:
        """Broadcast the bucket to all servers; again to the others whenever one of them is lost."""
        remaining = list(servers)
        while remaining:
            if self._group is None or self._members != [server.engine.url for server in remaining]:
                await self._form(remaining)
            elif not await self._broadcast(parcel, remaining, version):
                await self._leave(remaining)
            else:
                return
            remaining = live(remaining)

    async def close(self, servers: Sequence[Server]) -> None:
        """The group stays for the next push, unless somebody is missing."""
        if self._members != [server.engine.url for server in live(servers)]:
            await self._leave(servers)

    async def _form(self, servers: Sequence[Server]) -> None:
        """Make the group anew with these servers. Those that do not come get a problem, and there is no group."""
        await self._leave(servers)
        address = address_towards(servers[0].engine.url)
        if not is_private(address):
            raise EngineError(
                "MRL-5121",
                f"weights.transport=broadcast would send weights in the clear over the public address {address}.\n"
                "Reach the servers by a private network, or write weights.transport=disk.",
            )
        # our own side gives up before the servers' calls do, so that they can tell why
        timeout = 0.9 * self.timeout_seconds
        store, port = open_store(address, timeout)
        self._store, self._name = store, f"megarl-{secrets.token_hex(4)}"
        name = self._name
        size = 1 + sum(server.kind.tp_size for server in servers)
        ours = _in_thread(lambda: UpdateGroup(store, name, 0, size, self._backend, timeout))
        calls, offset = [], 1
        for server in servers:
            meeting = {
                "master_address": address, "master_port": port, "rank_offset": offset, "world_size": size,
                "group_name": self._name, "backend": self._backend,
            }  # fmt: skip
            calls.append(server.control("/init_weights_update_group", meeting, self.timeout_seconds))
            offset += server.kind.tp_size
        if await self._together(ours, servers, "joining the group", calls):
            self._group, self._members = ours.result(), [server.engine.url for server in servers]

    async def _broadcast(self, parcel: list[NamedTensor], servers: Sequence[Server], version: str | None) -> bool:
        group = self._group
        assert group is not None, "formed before"
        body = {
            "names": [name for name, _ in parcel],
            "dtypes": [dtype_name(tensor) for _, tensor in parcel],
            "shapes": [list(tensor.shape) for _, tensor in parcel],
            "group_name": self._name,
            "load_format": "flattened_bucket",
            **update_options(version),
        }
        flat = torch.cat([tensor.view(-1).view(torch.uint8) for _, tensor in parcel])
        ours = _in_thread(lambda: group.broadcast([flat]))
        calls = [server.control("/update_weights_from_distributed", body, self.timeout_seconds) for server in servers]
        return await self._together(ours, servers, "a bucket", calls)

    async def _together(
        self, ours: asyncio.Future[Any], servers: Sequence[Server], what: str, calls: Sequence[Awaitable[Any]]
    ) -> bool:
        """Whether the servers' calls and our own side of it succeeded; if not, whoever is to blame has a problem."""
        told = [asyncio.ensure_future(call) for call in calls]
        done, _ = await asyncio.wait(told, return_when=asyncio.FIRST_EXCEPTION)
        if any(task.exception() for task in done) and self._group is not None:
            # the others may wait for what will never come; this wakes them
            self._group.abandon()
        results = await asyncio.gather(*told, return_exceptions=True)
        faults = {server: fault for server, fault in zip(servers, results, strict=True) if fault is not None}
        faults = {server: fault for server, fault in faults.items() if isinstance(fault, BaseException)}
        if not faults:
            with contextlib.suppress(RuntimeError):
                await ours
                return True
        gone = [server for server, fault in faults.items() if await _is_gone(server, fault)]
        # When one is gone, the others' calls fail too, and they may have another try. Otherwise those who failed are to
        # blame; or all, if only our own side did.
        for server in gone or faults or servers:
            fault = faults.get(server)
            server.is_lost |= server in gone
            server.blame(f"{what}: {fault if fault is not None else 'the broadcast failed at the trainer'}")
        return False

    async def _leave(self, servers: Sequence[Server]) -> None:
        """Drop the group here and at every server that still listens."""
        group, self._group, self._members, self._store = self._group, None, [], None
        if group is not None:
            group.abandon()
        if self._name:
            body = {"group_name": self._name}
            calls = [
                server.control("/destroy_weights_update_group", body, _SHORT_SECONDS)
                for server in servers
                if not server.is_lost
            ]
            # one that never joined says so
            await asyncio.gather(*calls, return_exceptions=True)
        self._name = ""


async def _is_gone(server: Server, fault: BaseException) -> bool:
    """Whether the server itself failed, not only its part in a broadcast that somebody else broke."""
    if not isinstance(fault, EngineFault) or fault.kind == "refused":
        return False
    return fault.kind == "unreachable" or not await server.engine.is_healthy(_SHORT_SECONDS)


def _in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """Run what blocks in a thread that nobody waits for at the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    # a failure that nobody asks about is no news: the servers' answers tell
    future.add_done_callback(lambda done: done.exception())

    def settle(set_: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            set_(value)

    def run() -> None:
        try:
            outcome = (future.set_result, work())
        except Exception as error:
            outcome = (future.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="weight broadcast", daemon=True).start()
    return future
