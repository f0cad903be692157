"""What a run asks of a Ray cluster: which bundles, whether the cluster may be trusted, what is worth another start.

Nothing here imports Ray: everything is a function of what `on_ray` saw.
"""

from __future__ import annotations

import ipaddress
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError, DataError, EngineError, MissingInputError, RunDirInUseError, StorageError
from megarl.launch.layout import num_spare_gpus
from megarl.rewards.relay_link import may_listen

# Another start would meet the same mistake, or do harm.
_FINAL_CODES = {kind.exit_code for kind in (ConfigError, DataError, MissingInputError, RunDirInUseError, StorageError)}
# A rank, or its machine, was lost; or it was asked to leave by somebody else than us.
_PASSING_CODES = (69, 75, 76)
_FIRST_SIGNAL_CODE = 128
_SECONDS_TO_ANSWER = 5.0


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A living node of the cluster, and what it has in all."""

    address: str
    num_cpus: int
    num_gpus: int

    def holds(self, placement: Placement) -> bool:
        """Whether it has one bundle, if nobody else were there."""
        has = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return all(has[device] >= number for device, number in placement.bundle.items())

    def holds_rewards(self, placement: Placement) -> bool:
        """Whether it could be one of the nodes for reward workers, if nobody else were there."""
        return self.num_cpus >= placement.reward_cpus

    def count(self, device: Literal["CPU", "GPU"]) -> int:
        """How many of these devices it has."""
        return self.num_cpus if device == "CPU" else self.num_gpus


@dataclass(frozen=True, slots=True)
class Placement:
    """``per_node`` ranks on each of ``num_nodes`` nodes, one device each: rank r is on node ``r // per_node``.

    ``num_spare`` further GPUs of every node are for the generation servers that its first rank starts.
    ``num_reward_nodes`` further nodes, without ranks, give ``reward_cpus`` cores each to reward workers.
    """

    num_nodes: int
    per_node: int
    device: Literal["CPU", "GPU"]
    num_spare: int = 0
    num_reward_nodes: int = 0
    reward_cpus: int = 1

    @property
    def bundles(self) -> list[dict[str, float]]:
        """One for each node: first those with ranks, then those for rewards."""
        return [self.bundle] * self.num_nodes + [{"CPU": float(self.reward_cpus)}] * self.num_reward_nodes

    def fits(self, nodes: Sequence[ClusterNode]) -> bool:
        """Whether the nodes hold it, each bundle on a node of its own."""
        for_ranks = [node.holds(self) for node in nodes]
        for_rewards = [node.holds_rewards(self) for node in nodes] if self.num_reward_nodes else []
        either = [*map(max, for_ranks, for_rewards)] if for_rewards else for_ranks
        is_enough = sum(for_ranks) >= self.num_nodes and sum(for_rewards) >= self.num_reward_nodes
        return is_enough and sum(either) >= self.num_nodes + self.num_reward_nodes

    @property
    def bundle(self) -> dict[str, float]:
        """What one node has to give."""
        gpus = {"GPU": float(self.per_node + self.num_spare)} if self.device == "GPU" else {}
        return {"CPU": float(self.per_node), **gpus}

    def num_gpus_of(self, rank: int) -> int:
        """What one rank's actor takes of it; the first of a node takes the servers' as well."""
        if self.device == "CPU":
            return 0
        return 1 + (self.num_spare if rank % self.per_node == 0 else 0)

    def __str__(self) -> str:
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        number = self.per_node + self.num_spare
        text = f"{nodes} with {number} {self.device}{'s' if number > 1 else ''} each"
        if self.num_reward_nodes:
            text += f" and {self.num_reward_nodes} more with {self.reward_cpus} free CPUs each for rewards"
        return text


def plan_placement(config: RunConfig, nodes: Sequence[ClusterNode], asked_nodes: int | None) -> Placement:
    """As many nodes as were asked for, else the fewest that hold all ranks; every node gets the same number.

    If no number of nodes will do now, the answer is what would do if there were more nodes as large as the largest.
    """
    num_ranks = config.run.num_ranks
    has_gpus = any(node.num_gpus for node in nodes)
    wants_gpus = config.run.device == "cuda" or (config.run.device == "auto" and has_gpus)
    possible = [
        _placement(config, count, on_gpus=wants_gpus) for count in range(1, num_ranks + 1) if num_ranks % count == 0
    ]
    if asked_nodes is not None:
        asked = [one for one in possible if one.num_nodes == asked_nodes]
        if not asked:
            raise ConfigError(
                "MRL-1674",
                f"--nodes {asked_nodes} does not divide run.num_ranks={num_ranks}: every node gets the same number of "
                f"ranks.\nAsk for one of {', '.join(str(one.num_nodes) for one in possible)}.",
            )
        return asked[0]
    for one in possible:
        if one.fits(nodes):
            return one
    return next((one for one in possible if any(node.holds(one) for node in nodes)), possible[-1])


def _placement(config: RunConfig, num_nodes: int, *, on_gpus: bool) -> Placement:
    per_node = config.run.num_ranks // num_nodes
    rewards = {"num_reward_nodes": config.launch.reward_nodes, "reward_cpus": config.launch.reward_cpus}
    if not on_gpus:
        return Placement(num_nodes, per_node, "CPU", **rewards)
    return Placement(num_nodes, per_node, "GPU", num_spare_gpus(config, num_nodes), **rewards)


def visible_devices(of_actors: Sequence[str]) -> str | None:
    """CUDA_VISIBLE_DEVICES for the ranks of one node, from what Ray shows its actors; None: leave it as it is.

    All ranks of a node see the same list, as under torchrun: first one device of each rank, in their order, then those
    for generation servers.
    """
    lists = [[one for one in shown.split(",") if one] for shown in of_actors]
    if not all(lists):
        return None
    return ",".join([*(own[0] for own in lists), *(other for own in lists for other in own[1:])])


def lack(placement: Placement, nodes: Sequence[ClusterNode], num_free: float, seconds: float) -> EngineError:
    """The cluster did not give what the run needs."""
    # where ranks take GPUs, rewards still take cores
    is_mixed = placement.device == "GPU" and placement.num_reward_nodes > 0
    each = ", ".join(
        f"{node.address} with {node.count(placement.device)}{f' and {node.num_cpus} CPUs' if is_mixed else ''}"
        for node in nodes[:8]
    )
    more = f" and {len(nodes) - 8} more" if len(nodes) > 8 else ""
    return EngineError(
        "MRL-5321",
        f"the run needs {placement}, and the cluster did not give them within {seconds:.0f} s.\n"
        f"The cluster has {placement.device}s on {len(nodes)} nodes: {each}{more}; {num_free:g} are free.\n"
        "Add nodes, end other jobs, lower run.num_ranks, or wait longer: launch.join_timeout_seconds.",
    )


def require_closed(addresses: Iterable[str], *, asks_for_token: bool, is_allowed: bool) -> None:
    """Whoever reaches a cluster without authentication runs what he likes on it, with the rights of its user."""
    reachable = [address for address in addresses if not _is_loopback(address)]
    if reachable and not asks_for_token and not is_allowed:
        raise ConfigError(
            "MRL-1672",
            f"this Ray cluster answers without a token at {', '.join(reachable[:4])}: anybody who reaches it can run "
            "programs on it.\nStart it with RAY_AUTH_MODE=token (docs/ray.md), "
            "or set launch.allow_open_cluster=true if its network is closed.",
        )


def require_private(addresses: Iterable[str]) -> None:
    """What travels to reward workers on other nodes is not encrypted."""
    public = [address for address in addresses if not may_listen(address)]
    if public:
        raise ConfigError(
            "MRL-1676",
            f"launch.reward_nodes would send samples over a public network, unencrypted: {', '.join(public[:4])}.\n"
            "Start Ray with --node-ip-address of a private network, or set launch.reward_nodes=0.",
        )


def asks_for_token(dashboard: str | None, mode: str | None) -> bool:
    """Whether the cluster turns strangers away: ask it as one. Without a dashboard, go by the mode of this process."""
    if not dashboard:
        return mode == "token"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{dashboard}/api/jobs/", timeout=_SECONDS_TO_ANSWER):
            return False
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except OSError:
        return mode == "token"


def require_shared_directory(config: RunConfig) -> None:
    """Ray gives every job and node a copy of the working directory, and deletes it afterwards."""
    if not config.run.dir.startswith("/"):
        raise ConfigError(
            "MRL-1673",
            f"run.dir={config.run.dir} is relative, but on Ray a run works in a copy of the working directory that is "
            "deleted later.\nName a directory that all nodes share: run.dir=/shared/runs",
        )


def is_worth_a_restart(codes: Iterable[int | None]) -> bool:
    """How the ranks ended: exit codes, minus a signal, or None where the rank was lost with its node."""
    known = list(codes)
    if any(code in _FINAL_CODES for code in known):
        return False
    return any(code is None or code < 0 or code in _PASSING_CODES or code > _FIRST_SIGNAL_CODE for code in known)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
