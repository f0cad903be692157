"""Where a server's engine takes new weights from: SGLang's update routes, for the embedded engine.

An update is a session. If anything in it fails it stays open, and the engine does not serve, until a session that
begins anew is complete. What comes from outside is checked before it is used; names and shapes by the engine itself.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from aiohttp import web

from megarl.core.bucket import DTYPES, SHARED_MEMORY, BadManifest, NamedTensor, read_shape
from megarl.core.errors import EngineError
from megarl.core.update_group import UpdateGroup, reach_store
from megarl.generation.embedded.arrivals import MappedFiles, VersionFiles
from megarl.generation.embedded.weights import name_some
from megarl.generation.embedded.worker import EngineWorker

T = TypeVar("T")
# for others to come to a group, and for a broadcast
_GROUP_SECONDS = 60.0
_MAX_GROUP_SIZE = 1 << 20

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = Callable[[Mapping[str, Any]], Awaitable[None]]


class WeightReceiver:
    """The update routes of one engine. One request at a time is worked on."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker
        self._engine = worker.engine
        self._turn = asyncio.Lock()
        self._mapped = MappedFiles()
        self._groups: dict[str, UpdateGroup] = {}
        self._is_open = False
        # the version that came with the last bucket; None until then
        self._version: int | None = None
        self._arrived: set[str] = set()
        # what a session before this one brought, and this one has not brought yet
        self._stale: set[str] = set()

    def routes(self) -> list[web.RouteDef]:
        """All of them are control routes."""
        return [
            web.post("/begin_weight_update", self._answering(self._begin)),
            web.post("/update_weights_from_tensor", self._answering(self._from_tensor)),
            web.post("/update_weights_from_disk", self._answering(self._from_disk)),
            web.post("/init_weights_update_group", self._answering(self._join_group)),
            web.post("/update_weights_from_distributed", self._answering(self._from_distributed)),
            web.post("/destroy_weights_update_group", self._answering(self._leave_group)),
            web.post("/end_weight_update", self._answering(self._end)),
        ]

    def _answering(self, route: Route) -> Handler:
        async def handler(request: web.Request) -> web.Response:
            try:
                body = json.loads(await request.read() or b"{}")
                if not isinstance(body, dict):
                    raise ValueError("the body must be an object")
                # to its end also if the client is gone: the engine and what is known of it must not part
                await asyncio.shield(self._in_turn(route, body))
            except (ValueError, KeyError, RuntimeError, OSError, RecursionError, EngineError) as error:
                told = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                return web.json_response({"success": False, "message": told[:1000]}, status=400)
            return web.json_response({"success": True, "message": "Success"})

        return handler

    async def _in_turn(self, route: Route, body: Mapping[str, Any]) -> None:
        async with self._turn:
            await route(body)

    async def _begin(self, _: Mapping[str, Any]) -> None:
        """Open a session. One that is open is forgotten: its sender died, or failed."""
        if self._is_open:
            self._stale |= self._arrived
        else:
            await self._call(self._engine.begin_weight_update)
        self._is_open, self._version, self._arrived = True, None, set()

    async def _end(self, _: Mapping[str, Any]) -> None:
        if not self._is_open:
            raise ValueError("no weight-update session is open; call begin_weight_update() first")
        version = self._version
        if version is None:
            raise ValueError("no bucket brought a weight_version: the update is not complete")
        if self._stale:
            raise ValueError(f"{len(self._stale)} parameters are of an update that failed: {name_some(self._stale)}")
        await self._call(lambda: self._engine.end_weight_update(version))
        self._is_open, self._version, self._arrived = False, None, set()
        self._mapped.clear()

    async def _from_tensor(self, body: Mapping[str, Any]) -> None:
        self._check_open("update_weights_from_tensor")
        if body.get("load_format") != SHARED_MEMORY:
            raise ValueError(f"load_format must be {SHARED_MEMORY}: nothing is unpickled here")
        tensors = self._mapped.tensors(body["manifest"])
        await self._write(tensors, _version(body))

    async def _from_disk(self, body: Mapping[str, Any]) -> None:
        """A whole update in one call. Every file is checked before the first one is read for the engine."""
        version = _version(body)
        if version is None:
            raise ValueError("weight_version must be a number")
        with VersionFiles(_text(body, "model_path")) as files:
            await asyncio.to_thread(files.verify)
            await self._begin({})
            for name in files.names:
                await self._write(await asyncio.to_thread(files.read, name), version)
            await self._end({})

    async def _join_group(self, body: Mapping[str, Any]) -> None:
        name, address, backend = (_text(body, key) for key in ("group_name", "master_address", "backend"))
        rank, size = _number(body, "rank_offset", 1, _MAX_GROUP_SIZE), _number(body, "world_size", 2, _MAX_GROUP_SIZE)
        port = _number(body, "master_port", 1, 65535)
        if backend not in ("gloo", "nccl") or rank >= size:
            raise ValueError("backend must be gloo or nccl, and rank_offset below world_size")
        if name in self._groups:
            raise ValueError(f"there is a group {name[:80]!a} already")

        def join() -> UpdateGroup:
            store = reach_store(address, port, _GROUP_SECONDS)
            return UpdateGroup(store, name, rank, size, "gloo" if backend == "gloo" else "nccl", _GROUP_SECONDS)

        self._groups[name] = await asyncio.to_thread(join)

    async def _leave_group(self, body: Mapping[str, Any]) -> None:
        group = self._groups.pop(_text(body, "group_name"), None)
        if group is None:
            raise ValueError("The group to be destroyed does not exist.")
        group.abandon()

    async def _from_distributed(self, body: Mapping[str, Any]) -> None:
        self._check_open("update_weights_from_distributed")
        group = self._groups.get(_text(body, "group_name"))
        if group is None:
            raise ValueError("there is no such group; call init_weights_update_group first")
        if body.get("load_format") != "flattened_bucket":
            raise ValueError("load_format must be flattened_bucket")
        # the trainer's numbers may be wider than the engine's, at most twice as wide
        announced = _announced(body, 2 * self._engine.weight_bytes)
        sizes = [dtype.itemsize * math.prod(shape) for _, dtype, shape in announced]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
        try:
            await asyncio.to_thread(group.broadcast, [flat])
        except RuntimeError:
            # it is broken for good
            self._groups.pop(body["group_name"], None)
            raise
        # without gaps between them, so a piece may have to move to be aligned
        tensors = [
            (name, (piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()).view(dtype).view(shape))
            for (name, dtype, shape), piece in zip(announced, torch.split(flat, sizes), strict=True)
        ]
        await self._write(tensors, _version(body))

    async def _write(self, tensors: Sequence[NamedTensor], version: int | None) -> None:
        names = {name for name, _ in tensors}
        await self._call(lambda: self._engine.update_weights(tensors))
        self._arrived |= names
        self._stale -= names
        if version is not None:
            self._version = version

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._worker.call(function))

    def _check_open(self, route: str) -> None:
        if not self._is_open:
            raise ValueError(f"{route} must run between begin_weight_update() and end_weight_update()")


def _announced(body: Mapping[str, Any], max_bytes: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of what a broadcast will bring."""
    lists = [body["names"], body["dtypes"], body["shapes"]]
    if not all(isinstance(each, list) for each in lists) or len({len(each) for each in lists}) != 1 or not lists[0]:
        raise BadManifest("names, dtypes and shapes must be lists of one length")
    found = []
    for name, dtype, shape in zip(*lists, strict=True):
        if not isinstance(name, str) or dtype not in DTYPES:
            raise BadManifest(f"names must be text, and dtypes one of {', '.join(DTYPES)}")
        found.append((name, DTYPES[dtype], read_shape(shape, ascii(name[:80]))))
    if sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in found) > max_bytes:
        raise BadManifest(f"a bucket of more than {max_bytes} bytes is larger than the model")
    return found


def _number(body: Mapping[str, Any], key: str, low: int, high: int) -> int:
    value = body[key]
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{key} must be a number from {low} to {high}")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body[key]
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a text that is not empty")
    return value


def _version(body: Mapping[str, Any]) -> int | None:
    """SGLang's versions are texts; megarl's are numbers."""
    value = body.get("weight_version")
    if value is None:
        return None
    if not isinstance(value, str) or not re.fullmatch(r"[0-9]{1,18}", value):
        raise ValueError("weight_version must be the text of a number")
    return int(value)
