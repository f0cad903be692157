"""``megarl launch ray``: the same program as ever, once per device, in processes that Ray actors start.

The only file that imports Ray. Ray finds the devices, starts one actor beside each, and tells when one is lost; the
ranks meet over their own sockets and are watched by their guards, so that no tensor and no number of the training ever
is a Ray object. This process, the driver of the Ray job, hands the console of rank 0 on as it is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.config.schema import RunConfig
from megarl.core.errors import EXIT_INTERNAL, EXIT_OK, EngineError, MegarlError, PreemptedIdle
from megarl.launch.hosted import HostedRank, HostedRelay, Place
from megarl.launch.network import LOOPBACK
from megarl.launch.ray_plan import (
    ClusterNode,
    Placement,
    asks_for_token,
    is_worth_a_restart,
    lack,
    plan_placement,
    require_closed,
    require_private,
    visible_devices,
)
from megarl.launch.rendezvous import RankRecord, hand_over
from megarl.rewards.relay_link import Relay, Relays
from megarl.run.directory import claim
from megarl.run.stop import SIGNALS, StopRequest

# A rank is asked for news; it answers when there are any, or after this time.
_POLL_SECONDS = 30.0
# How often signals are looked at.
_BEAT_SECONDS = 0.5
# When one rank has failed, the guards end the others, and have their say.
_SECONDS_TO_END = 30.0
# What a step and a checkpoint may well take when a job is stopped.
_SECONDS_TO_STOP = 60
_TAIL = 4096


def examine_on_ray(config: RunConfig, words: list[str], *, asked_nodes: int | None) -> int:
    """``megarl doctor`` in place of the training, once; ``words`` is what follows ``megarl`` in a rank's command."""
    stop = _Stop()
    with _cluster(config):
        stop.listen()
        with _placed(config, asked_nodes, stop) as group:
            ends = group.run(words, 0, stop)
        return _judge(group, ends, stop)


def train_on_ray(config: RunConfig, words: list[str], *, asked_nodes: int | None, fresh: bool) -> int:
    """Train to the end on the cluster that this process is in; returns the exit code.

    ``words`` is what follows ``megarl`` in a rank's command. Ranks that are lost are all started again, from the last
    checkpoint, up to ``launch.max_restarts`` times.
    """
    stop = _Stop()
    with _cluster(config):
        stop.listen()  # after Ray, which has a handler of its own
        _warn_of_hasty_stops()
        if fresh:  # here, once: a rank that is started again must neither forget it nor start over again
            claim(config, fresh=True).release()
        for attempt in range(config.launch.max_restarts + 1):
            with _placed(config, asked_nodes, stop) as group:
                ends = group.run(words, attempt, stop)
            code = _judge(group, ends, stop)
            if code == EXIT_OK or stop.request.received is not None or not is_worth_a_restart(ends.values()):
                return code
            if attempt < config.launch.max_restarts:
                _say(
                    f"Restart {attempt + 1} of {config.launch.max_restarts}: all ranks go on from the last checkpoint."
                )
        if config.launch.max_restarts:
            _say(f"Not restarted again: launch.max_restarts={config.launch.max_restarts}.")
        return code


class _Stop:
    """Requests to stop that came as signals, and have to be passed on to the ranks."""

    def __init__(self) -> None:
        self.request = StopRequest()
        self._to_pass_on: list[int] = []

    def listen(self) -> None:
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    def take(self) -> list[int]:
        """What has to be passed on since the last time."""
        numbers, self._to_pass_on = self._to_pass_on, []
        return numbers

    def _handle(self, number: int, _: object) -> None:
        if self.request.take(number, time.monotonic()):
            for known in SIGNALS:
                signal.signal(known, signal.SIG_IGN)
            sys.exit(128 + number)
        # Ray blocks SIGINT in its workers and what they start
        self._to_pass_on.append(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)


@contextlib.contextmanager
def _cluster(config: RunConfig) -> Iterator[None]:
    """Connected to the cluster that is already there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        context = ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RayError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise EngineError(
            "MRL-5322",
            f"there is no Ray cluster to train on: {reason}\n"
            "Start one (docs/ray.md) and use: ray job submit --working-dir . -- megarl launch ray CONFIG",
        ) from None
    try:
        is_closed = asks_for_token(context.dashboard_url, os.environ.get("RAY_AUTH_MODE"))
        addresses = [node.address for node in _nodes()]
        require_closed(addresses, asks_for_token=is_closed, is_allowed=config.launch.allow_open_cluster)
        yield
    finally:
        ray.shutdown()


def _warn_of_hasty_stops() -> None:
    """Ray kills a job that it stops after so many seconds: it must be long enough for a step and a checkpoint."""
    seconds = os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", "3")
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and seconds.isdecimal() and int(seconds) < _SECONDS_TO_STOP:
        _say(f"`ray job stop` would kill this run after {seconds} s: set RAY_JOB_STOP_WAIT_TIME_S, see docs/ray.md.")


def _nodes() -> list[ClusterNode]:
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            found.append(ClusterNode(str(node["NodeManagerAddress"]), int(has.get("CPU", 0)), int(has.get("GPU", 0))))
    return found


@contextlib.contextmanager
def _placed(config: RunConfig, asked_nodes: int | None, stop: _Stop) -> Iterator[_Group]:
    """One actor per device, on nodes that are all there. None of them is left afterwards, nor what they started."""
    placement = plan_placement(config, _nodes(), asked_nodes)
    bundles = placement_group(placement.bundles, strategy="STRICT_SPREAD")
    hosts: list[Any] = []
    relays: list[Any] = []
    try:
        _await_bundles(bundles, placement, config.launch.join_timeout_seconds, stop)
        kind = ray.remote(_Host)
        for rank in range(config.run.num_ranks):
            options = {
                "num_cpus": 1,
                "num_gpus": placement.num_gpus_of(rank),
                "max_concurrency": 4,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(bundles, rank // placement.per_node),
            }
            hosts.append(kind.options(**options).remote())
        for number in range(placement.num_nodes, len(placement.bundles)):
            strategy = PlacementGroupSchedulingStrategy(bundles, number)
            own = ray.remote(_RelayHost).options(num_cpus=placement.reward_cpus, scheduling_strategy=strategy)
            relays.append(own.remote())
        yield _Group(config, placement, hosts, relays)
    finally:
        for actor in (*hosts, *relays):
            ray.kill(actor)
        remove_placement_group(bundles)


def _await_bundles(bundles: Any, placement: Placement, seconds: float, stop: _Stop) -> None:
    deadline = time.monotonic() + seconds
    while not bundles.wait(min(_BEAT_SECONDS, max(0.0, deadline - time.monotonic()))):
        if stop.request.received is not None:
            raise PreemptedIdle("MRL-8002", f"stopped by {stop.request.received.name} at the start.\nSubmit it again.")
        if time.monotonic() > deadline:
            num_free = ray.available_resources().get(placement.device, 0.0)
            raise lack(placement, _nodes(), num_free, seconds)


class _Host(HostedRank):
    """What an actor is."""

    def address(self) -> str:
        """This node's address, as the cluster knows it."""
        return str(ray.util.get_node_ip_address())


class _RelayHost(HostedRelay):
    """What an actor on a node for reward workers is."""

    def address(self) -> str:
        """This node's address, as the cluster knows it."""
        return str(ray.util.get_node_ip_address())


@dataclass
class _Group:
    """All ranks of one start. How each ended: exit code, minus a signal, or None if it was lost with its actor."""

    config: RunConfig
    placement: Placement
    hosts: list[Any]
    # actors on nodes for reward workers
    relays: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    # what each rank wrote last
    tails: dict[int, bytes] = field(default_factory=dict)

    def run(self, words: Sequence[str], attempt: int, stop: _Stop) -> dict[int, int | None]:
        """From start to end; returns how each rank ended."""
        try:
            self._start(words, attempt)
        except RayError as error:  # an actor, or its node, was lost already
            self._hear(0, f"{_first_line(error)}\n".encode())
            return dict.fromkeys(range(len(self.hosts)))
        return self._follow(stop)

    def _start(self, words: Sequence[str], attempt: int) -> None:
        """The same command in every actor, each with its own record."""
        patience = self.config.launch.join_timeout_seconds
        places: list[Place] = ray.get([host.place.remote() for host in self.hosts], timeout=patience)
        self.names = [place.host for place in places]
        per_node, num_nodes = self.placement.per_node, self.placement.num_nodes
        address = LOOPBACK if num_nodes == 1 else ray.get(self.hosts[0].address.remote(), timeout=patience)
        meeting = f"tcp://{f'[{address}]' if ':' in address else address}:{places[0].port}"
        # with a working directory of its own the job has a copy on every node, which is where the actors are
        directory = None if ray.get_runtime_context().runtime_env.get("working_dir") else os.getcwd()
        started = []
        for rank, host in enumerate(self.hosts):
            node, local = divmod(rank, per_node)
            shown = visible_devices([place.devices for place in places[node * per_node : (node + 1) * per_node]])
            record = RankRecord(
                "ray", rank, len(self.hosts), local, per_node, node, num_nodes,
                address, places[0].port, local if shown else 0, meeting, attempt,
            )  # fmt: skip
            variables = hand_over(record) | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {})
            if rank == 0 and self.relays:  # the driver, which is the only one that scores
                variables |= self._start_relays(directory, patience).variables()
            started.append(host.start.remote(list(words), variables, directory))
        ray.get(started, timeout=patience)

    def _start_relays(self, directory: str | None, patience: float) -> Relays:
        """A relay for reward workers on each of their nodes, with a token of this start."""
        addresses: list[str] = ray.get([relay.address.remote() for relay in self.relays], timeout=patience)
        require_private(addresses)
        token, num_cpus = secrets.token_hex(32), self.placement.reward_cpus
        started = [
            relay.start.remote(address, token, directory) for relay, address in zip(self.relays, addresses, strict=True)
        ]
        places = []
        for address, (port, why) in zip(addresses, ray.get(started, timeout=patience), strict=True):
            if not port:
                raise EngineError("MRL-5324", f"the relay for reward workers does not start at {address}.\n{why}")
            places.append(Relay(address, port, num_cpus))
        return Relays(tuple(places), token)

    def _follow(self, stop: _Stop) -> dict[int, int | None]:
        """Until all ranks have ended. Rank 0's console is this process's."""
        ends: dict[int, int | None] = {}
        asked = {host.poll.remote(_POLL_SECONDS): rank for rank, host in enumerate(self.hosts)}
        heard = dict.fromkeys(range(len(self.hosts)), time.monotonic())
        deadline = math.inf
        while asked and time.monotonic() < deadline:
            for number in stop.take():
                for host in self.hosts:
                    host.signal.remote(number)
            answered, _ = ray.wait(list(asked), num_returns=1, timeout=_BEAT_SECONDS)
            now = time.monotonic()
            for answer in answered:
                rank = asked.pop(answer)
                heard[rank] = now
                is_there = self._take(rank, answer, ends)
                if is_there:
                    asked[self.hosts[rank].poll.remote(_POLL_SECONDS)] = rank
            silence = _POLL_SECONDS + (self.config.launch.hang_timeout_seconds or math.inf)
            is_failed = any(code != EXIT_OK for code in ends.values())
            if is_failed or any(now - heard[rank] > silence for rank in asked.values()):
                deadline = min(deadline, now + _SECONDS_TO_END)
        return ends | dict.fromkeys(asked.values())

    def _take(self, rank: int, answer: Any, ends: dict[int, int | None]) -> bool:
        """News of a rank; returns whether more will come."""
        try:
            output, code = ray.get(answer)
        except RayError as error:
            if rank:
                self._hear(rank, f"\n{_first_line(error)}\n".encode())
            ends[rank] = None
            return False
        self._hear(rank, output)
        if code is not None:
            ends[rank] = code
        return code is None

    def _hear(self, rank: int, output: bytes) -> None:
        self.tails[rank] = (self.tails.get(rank, b"") + output)[-_TAIL:]
        if rank == 0 and output:
            sys.stdout.buffer.write(output)
            sys.stdout.buffer.flush()


def _judge(group: _Group, ends: dict[int, int | None], stop: _Stop) -> int:
    """The exit code; and one reason, if rank 0's console has not given it yet."""
    if all(code == EXIT_OK for code in ends.values()):
        return EXIT_OK
    asked = stop.request.received
    is_explained = any(b"MRL-" in group.tails.get(rank, b"") for rank in ends)
    if asked is not None and not is_explained:
        early = PreemptedIdle("MRL-8002", f"stopped by {asked.name} at the start.\nSubmit it again to go on.")
        _say(str(early))
        return early.exit_code
    if b"MRL-" not in group.tails.get(0, b""):
        _say(_reason(group, ends))
    codes = [code for code in (ends[rank] for rank in sorted(ends)) if code is not None and code > 0]
    if codes:
        return codes[0]
    return EngineError.exit_code if None in ends.values() else EXIT_INTERNAL


def _reason(group: _Group, ends: dict[int, int | None]) -> str:
    for rank in sorted(ends):
        lines = group.tails.get(rank, b"").decode(errors="replace").splitlines()
        told = next((n for n, line in enumerate(lines) if line.startswith("MRL-")), None)
        if told is not None:
            return "\n".join(lines[told : told + 8])
    rank = next(rank for rank in sorted(ends) if ends[rank] != EXIT_OK)
    code = ends[rank]
    how = "was lost with its Ray actor" if code is None else f"ended with exit code {code}"
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
    last = group.tails.get(rank, b"").decode(errors="replace").strip()[-400:]
    where = f" on {group.names[rank]}" if group.names else ""
    return str(MegarlError("MRL-5323", f"rank {rank}{where} {how}, without a word.\nIts last lines: {last}"))


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
