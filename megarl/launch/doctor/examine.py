"""``megarl doctor`` itself: on one machine, or as a rank under any launcher. The driver tells what all found."""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from megarl import __version__
from megarl.config.schema import RunConfig
from megarl.core.errors import EXIT_OK, ConfigError, EngineError
from megarl.launch.doctor.finding import Finding, Merged, as_table, merge, worst
from megarl.launch.doctor.machine import check_machine
from megarl.launch.doctor.variables import check_variables
from megarl.launch.network import choose_interface
from megarl.launch.rendezvous import RankRecord, identify

if TYPE_CHECKING:
    from megarl.core.world import World

_JOIN_SECONDS = 300.0


def examine(config: RunConfig | None, *, as_json: bool) -> int:
    """Check everything and say it; the exit code is 0 unless a check found an error."""
    record = _record()
    cores = os.cpu_count() or 1
    own = check_variables(os.environ, config, psutil.net_if_addrs(), cores)
    if record is None or record.local_rank == 0:  # one rank looks at its machine for all that are there
        own += check_machine(config, record.local_size if record else 1)
    host = socket.gethostname()
    if record is None:
        return _tell(merge([(host, own)]), "this machine", 1, as_json=as_json)
    by_rank = _meet(record, config, own, host)
    if by_rank is None:
        return EXIT_OK
    hosts = {name for name, _ in by_rank}
    what = f"{record.size} ranks on {record.num_nodes} node{'s' * (record.num_nodes > 1)} ({record.launcher})"
    return _tell(merge(by_rank), what, len(hosts), as_json=as_json)


def _record() -> RankRecord | None:
    """None also where the launcher's variables make no sense: then that is a finding."""
    try:
        return identify(os.environ)
    except ConfigError:
        return None


def _meet(
    record: RankRecord, config: RunConfig | None, own: list[Finding], host: str
) -> list[tuple[str, list[Finding]]] | None:
    """Everybody's findings, and those that it takes everybody to find, on the driver; None elsewhere. Collective."""
    interface = choose_interface(record, os.environ)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch.distributed as dist

    from megarl.launch.doctor.together import check_together
    from megarl.models.rendezvous import Rendezvous, join

    seconds = config.launch.join_timeout_seconds if config is not None else _JOIN_SECONDS
    patience = timedelta(seconds=seconds)
    join(Rendezvous(record.rank, record.size, record.local_rank, record.meeting, join_timeout=patience), "gloo")
    world = _world(record)
    # several ranks of one test machine may have its name; the node's number tells them apart
    name = host if record.num_nodes == 1 else f"{host}, node {record.node_rank}"
    own.insert(0, Finding("interface", "ok", os.environ.get("GLOO_SOCKET_IFNAME", "chosen by gloo")))
    hosts: list[str] = world.broadcast(world.gather(name))
    directory = Path(config.run.dir if config is not None else "runs")
    together = check_together(world, hosts, directory)
    gathered = world.gather([finding.to_tree() for finding in own])
    world.barrier()
    dist.destroy_process_group()
    if gathered is None:
        return None
    findings = [[Finding(**tree) for tree in trees] for trees in gathered]
    findings[0] += together
    by_rank = list(zip(hosts, findings, strict=True))
    # what was found together is everybody's
    return by_rank + [(one, together) for one in hosts[1:]]


def _world(record: RankRecord) -> World:
    """All ranks, with no model laid out over them."""
    import torch
    import torch.distributed as dist

    from megarl.core.world import Axis, World

    group = dist.group.WORLD
    assert group is not None, "joined"
    whole = Axis(0, 1, group)
    return World(
        record.rank, record.size, record.local_rank, torch.device("cpu"), group,
        tp=whole, pp=whole, dp=whole, cp=whole, ep=whole, etp=whole, edp=whole, dp_rank_of=(),
    )  # fmt: skip


def _tell(merged: list[Merged], what: str, num_hosts: int, *, as_json: bool) -> int:
    level = worst(merged)
    if as_json:
        rows = [{**one.finding.to_tree(), "hosts": list(one.hosts)} for one in merged]
        tree = {"megarl": __version__, "checked": what, "worst": level, "findings": rows}
        sys.stdout.write(json.dumps(tree, indent=1) + "\n")
    else:
        counts = {name: sum(one.finding.level == name for one in merged) for name in ("error", "warning", "ok")}
        sys.stdout.write(f"megarl doctor: {what}\n{as_table(merged, num_hosts)}\n")
        sys.stdout.write(f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} ok\n")
    if level != "error":
        return EXIT_OK
    bad = [one.finding.name for one in merged if one.finding.level == "error"]
    raise EngineError("MRL-5305", f"not ready to train: {', '.join(bad)}.\nThe lines above say what to do.")
