"""Engines that are servers: started on every machine of the run, or the user's own."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.distributed_c10d import _get_default_store

from megarl.config.layout import hf_config_of, max_sequence_length, model_shape
from megarl.config.schema import RunConfig
from megarl.core.errors import EngineError
from megarl.core.loop_thread import LoopThread
from megarl.core.protocols import OffloadPart, ServerProcesses
from megarl.core.secret import Secret, resolve
from megarl.core.world import DRIVER, World
from megarl.generation.fleet.servers import ServerFleet
from megarl.generation.fleet.settings import FleetSettings
from megarl.generation.http.client import EngineClient
from megarl.generation.parts import ServerMemory
from megarl.generation.servers.elsewhere import Errands, ServersEverywhere
from megarl.generation.servers.model_directory import write_model_directory
from megarl.generation.servers.processes import ServerSpec, StartedServers
from megarl.generation.servers.router import Router, start_router
from megarl.generation.servers.sglang_args import SglangModel, sglang_args, sglang_environment
from megarl.rollout.serving import ServerServing
from megarl.run.engines import Connected
from megarl.run.residency import Residency
from megarl.run.roles import run_dtype
from megarl.run.sync import EngineSync
from megarl.weights.broadcast import BroadcastRoad
from megarl.weights.disk import DiskRoad
from megarl.weights.inprocess import Export
from megarl.weights.road import Road
from megarl.weights.servers import ServerTransport
from megarl.weights.tensor import TensorRoad

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Address:
    """Where a server listens, and the rank on its machine that may hand it memory."""

    url: str
    rank: int


class ServerEngines:
    """The servers of a run. Every rank has one of these; those that talk to servers have clients. Collective."""

    def __init__(self, config: RunConfig, world: World, directory: Path, say: Callable[[str], None]) -> None:
        self._config = config
        self._world = world
        self._directory = directory
        self._api_key, self._admin_key = self._keys()
        self._started = None if config.generation.urls else self._start()
        self._addresses = self._everybody()
        self._router = self._route() if world.is_driver else None
        self._loop = LoopThread("megarl-servers")
        self._clients = {address.url: self._client(address.url) for address in self._addresses}
        self._errands = None
        if self._started is not None and not world.is_driver:
            self._errands = Errands(self._started, world.rank, _get_default_store())
        self._fleet = self._make_fleet(say) if world.is_driver else None

    @property
    def parts(self) -> dict[str, OffloadPart]:
        """What they take of the trainer's devices: nothing if they have their own."""
        if not self._config.engine_shares_devices:
            return {}
        return {
            "engine.weights": ServerMemory(self._fleet, "weights", self._world),
            "engine.kv_cache": ServerMemory(self._fleet, "kv_cache", self._world),
        }

    def connect(self, export: Export, residency: Residency) -> Connected:
        """Make the road from the trainer's weights to them. Collective."""
        transport_name = self._transport_name()
        couriers = {one.url: one.rank if transport_name == "tensor" else DRIVER for one in self._addresses}
        transport = ServerTransport(
            export,
            couriers,
            self._clients.__getitem__,
            self._fleet,
            self._road(transport_name),
            self._world,
            self._loop,
            lambda: serving.is_busy,
        )
        sync = EngineSync(transport, residency, self._someone_lacks_weights)
        serving = ServerServing(self._fleet, sync.refresh, residency.phase, self._world)
        return Connected(serving, sync)

    def close(self) -> None:
        """End what was started."""
        if self._fleet is not None:
            if self._config.generation.urls and self._config.engine_shares_devices:
                self._fleet.resume(["weights", "kv_cache"])  # they were there before, and stay
            self._fleet.close()
        for client in self._clients.values():
            self._loop.run(client.close())
        self._loop.close()
        if self._router is not None:
            self._router.stop()
        if self._errands is not None:
            self._errands.close()
        if self._started is not None:
            self._started.stop()

    def _someone_lacks_weights(self) -> bool:
        return bool(self._world.broadcast(self._fleet.needs_push() if self._fleet is not None else None))

    def _keys(self) -> tuple[Secret | None, Secret | None]:
        """Those of the user's servers, or new ones that nobody else knows."""
        own = self._config.generation
        if own.urls:
            api_key = resolve(own.api_key) if own.api_key else None
            return api_key, resolve(own.admin_key) if own.admin_key else api_key
        new = self._world.broadcast([secrets.token_urlsafe(32), secrets.token_urlsafe(32)])
        return Secret(new[0]), Secret(new[1])

    def _start(self) -> StartedServers | None:
        """The servers of this machine, started by the first of its ranks."""
        nodes = [place.node for place in self._world.places] or [0] * self._world.size
        node = nodes[self._world.rank]
        if nodes.index(node) != self._world.rank:
            return None
        num_nodes, num_ranks = len(set(nodes)), nodes.count(node)
        wanted = self._config.generation.num_servers
        share = wanted // num_nodes + (node < wanted % num_nodes) if wanted else self._num_that_fit(num_ranks)
        host = _LOOPBACK if num_nodes == 1 else _own_address()
        specs = [self._spec(number, num_ranks, host) for number in range(share)]
        assert self._api_key is not None and self._admin_key is not None, "made for started servers"
        started = StartedServers(
            specs,
            self._directory / "logs",
            self._api_key,
            self._admin_key,
            self._config.generation.start_timeout_seconds,
        )
        started.start()
        return started

    def _num_that_fit(self, num_ranks: int) -> int:
        """SGLang servers of one machine: on the trainer's devices, or on those that it leaves free."""
        if self._world.device.type != "cuda":
            return 1
        own = self._config.generation
        devices = num_ranks if own.colocated else torch.cuda.device_count() - num_ranks
        if devices < own.tp_size:
            raise EngineError(
                "MRL-5157",
                f"an SGLang server needs {own.tp_size} GPUs (generation.tp_size), and {devices} are there for it: "
                f"{num_ranks} ranks on this machine, generation.colocated={str(own.colocated).lower()}. Use fewer "
                "ranks per machine, a smaller generation.tp_size, or colocate.",
            )
        return devices // own.tp_size

    def _spec(self, number: int, num_ranks: int, host: str) -> ServerSpec:
        config, own, device = self._config, self._config.generation, self._world.device.type
        first_device = number * own.tp_size + (0 if own.colocated else num_ranks)
        length, dtype = max_sequence_length(config), str(run_dtype(config, self._world.device)).removeprefix("torch.")
        if own.engine == "embedded":
            settings: Mapping[str, Any] = {
                "model_config": hf_config_of(config),
                "num_slots": own.num_slots,
                "max_sequence_length": length,
                "device": f"cuda:{first_device}" if device == "cuda" else device,
                "dtype": dtype,
                "num_threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
            }
            return ServerSpec("embedded", settings, host)
        directory = self._directory / "engine_model"
        write_model_directory(directory, hf_config_of(config))
        model = SglangModel(
            directory, dtype, length, own.num_slots, own.tp_size, device, own.colocated, config.run.seed + number
        )
        # Weights may change while requests run: later requests must not find what older ones computed of a prompt.
        overrides = {"disable_radix_cache": True, **own.sglang} if config.num_steps_ahead > 1 else own.sglang
        settings = sglang_args(model, overrides)
        if device == "cuda":
            settings = {**settings, "base_gpu_id": first_device}
        python = {"python": own.python} if own.python is not None else {}
        return ServerSpec("sglang", settings, host, environment=sglang_environment(device), **python)

    def _everybody(self) -> list[_Address]:
        """All servers, in one order on every rank. Collective."""
        own = self._config.generation.urls or (self._started.urls if self._started is not None else [])
        gathered = self._world.gather(list(own) if self._started is not None or self._world.is_driver else [])
        found = [[url, rank] for rank, urls in enumerate(gathered or []) for url in urls]
        return [_Address(url.rstrip("/"), rank) for url, rank in self._world.broadcast(found)]

    def _route(self) -> Router | None:
        own = self._config.generation
        if own.router is None:
            return None
        urls = [address.url for address in self._addresses]
        log = self._directory / "logs" / "router.log"
        return start_router(own.router, urls, self._api_key, log, own.python, own.start_timeout_seconds)

    def _client(self, url: str) -> EngineClient:
        shape = model_shape(self._config)
        wants_experts = self._config.generation.sglang.get("enable_return_routed_experts") and shape.experts is not None
        experts = (shape.num_layers, shape.experts.num_experts_per_token) if wants_experts and shape.experts else None
        return EngineClient(
            url,
            self._api_key,
            self._admin_key,
            vocab_size=shape.vocab_size,
            road=self._router.road if self._router else None,
            expert_shape=experts,
        )

    def _make_fleet(self, say: Callable[[str], None]) -> ServerFleet:
        own = self._config.generation
        settings = FleetSettings(
            own.num_slots,
            own.request_timeout_seconds,
            own.step_timeout_seconds,
            own.min_servers,
            own.max_restarts,
        )
        processes: ServerProcesses | None = self._started
        rank_of = {address.url: address.rank for address in self._addresses}
        if not own.urls and set(rank_of.values()) != {DRIVER}:
            processes = ServersEverywhere(self._started, rank_of, _get_default_store(), own.start_timeout_seconds)
        return ServerFleet(list(self._clients.values()), settings, self._loop, processes, say)

    def _transport_name(self) -> Literal["tensor", "broadcast", "disk"]:
        name = self._config.weights.transport
        if name == "auto":
            is_near = not self._config.generation.urls or all("127.0.0.1" in url for url in self._clients)
            return "tensor" if is_near else "broadcast"
        assert name != "inprocess", "checked with the configuration"
        return name

    def _road(self, name: Literal["tensor", "broadcast", "disk"]) -> Road:
        if name == "tensor":
            return TensorRoad()
        if name == "broadcast":
            return BroadcastRoad(self._world.device)
        shared, own = self._config.weights.directory, self._directory / "weights"
        directory = own if shared is None else Path(shared) / self._config.run.name
        return DiskRoad(directory, hf_config_of(self._config))


def _own_address() -> str:
    """This machine's address on the network that it shares with the driver's, which must be a private one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", _LOOPBACK), 9))  # nothing is sent
        address = str(probe.getsockname()[0])
    if not ipaddress.ip_address(address).is_private:
        raise EngineError(
            "MRL-5156",
            f"generation servers would listen on {address}, which is a public address. Let MASTER_ADDR be an address "
            "of the cluster's private network.",
        )
    return address
