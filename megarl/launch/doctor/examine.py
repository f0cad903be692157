"""``megarl doctor`` itself: on one machine, or as a rank under any launcher. The driver tells what all found."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import psutil

from megarl import __version__
from megarl.config.schema import RunConfig
from megarl.core.errors import EXIT_OK, ConfigError, EngineError
from megarl.launch.doctor.compare import Report, own_settings, own_software
from megarl.launch.doctor.devices import check_devices, look_at_devices
from megarl.launch.doctor.finding import Finding, Merged, as_finding, as_table, merge, worst
from megarl.launch.doctor.limits import num_usable_cores
from megarl.launch.doctor.machine import check_machine
from megarl.launch.doctor.variables import Surroundings, check_variables
from megarl.launch.network import choose_interface, interface_of, own_address
from megarl.launch.rendezvous import RankRecord, identify

_JOIN_SECONDS = 300.0


def examine(config: RunConfig | None, *, as_json: bool) -> int:
    """Check everything and say it; the exit code is 0 unless a check found an error."""
    record = _record()
    report = _look(config, record)
    if record is None:
        return _tell(merge([(report.host, report.findings)]), "this machine", 1, as_json=as_json)
    from megarl.launch.doctor.ranks import Examined, examine_ranks

    if any(one.name == "network" for one in report.findings):  # no way leads to the others
        examined: Examined | None = Examined({record.rank: report}, [])
    else:
        if report.may_connect and (chosen := choose_interface(record, os.environ)) is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = chosen
        seconds = config.launch.join_timeout_seconds if config is not None else _JOIN_SECONDS
        examined = examine_ranks(record, report, _directory(config), seconds)
    if examined is None:
        return EXIT_OK
    by_rank = [(one.host, one.findings) for one in examined.reports.values()]
    hosts = {host for host, _ in by_rank}
    merged = merge([*by_rank, *((host, examined.together) for host in sorted(hosts))])
    if record.rank != 0:  # it could not reach the driver; the first of each node speaks
        what = f"rank {record.rank} of {record.size} by itself ({record.launcher})"
        return _tell(merged, what, len(hosts), as_json=as_json) if record.local_rank == 0 else EngineError.exit_code
    what = f"{record.size} ranks on {record.num_nodes} node{'s' * (record.num_nodes > 1)} ({record.launcher})"
    return _tell(merged, what, len(hosts), as_json=as_json)


def _record() -> RankRecord | None:
    """None also where the launcher's variables make no sense: then that is a finding."""
    try:
        return identify(os.environ)
    except ConfigError:
        return None


def _directory(config: RunConfig | None) -> Path:
    return Path(config.run.dir if config is not None else "runs")


def _interface(record: RankRecord | None) -> tuple[Finding, str | None]:
    """The interface that ranks here would use, and the one that leads to rank 0, which need not be the same."""
    if record is None:
        addresses = (
            f"{name} {one.address}"
            for name, all_of_it in sorted(psutil.net_if_addrs().items())
            for one in all_of_it
            if one.family == socket.AF_INET
        )
        return Finding("interface", "ok", f"lo for ranks of one machine; there are: {', '.join(addresses)}"), None
    try:
        chosen = choose_interface(record, os.environ) or os.environ.get("GLOO_SOCKET_IFNAME", "chosen by gloo")
        road = "lo" if record.num_nodes == 1 else interface_of(own_address(record.master_address))
    except ConfigError as error:
        return as_finding("network", error), None
    return Finding("interface", "ok", chosen), road


def _look(config: RunConfig | None, record: RankRecord | None) -> Report:
    """What this process finds by itself. One rank looks at its machine for all that are there."""
    num_cores = num_usable_cores()
    if record is not None and record.launcher == "slurm" and num_cores < (os.cpu_count() or 1):
        num_cores *= record.local_size  # each task is bound to cores of its own
    interface, road = _interface(record)
    found = check_variables(os.environ, config, Surroundings(psutil.net_if_addrs(), num_cores, road))
    if not any(one.name == "interface" for one in found):  # else the one in use is a wrong one
        found.insert(0, interface)
    devices = look_at_devices()
    index = record.device_index if record is not None else 0
    found += check_devices(devices, config, index, num_cores)
    if record is None or record.local_rank == 0:
        found += check_machine(config)
    host = socket.gethostname()
    # several ranks of one test machine may have its name; the node's number tells them apart
    name = host if record is None or record.num_nodes == 1 else f"{host}, node {record.node_rank}"
    return Report(name, found, own_software(), own_settings(config), devices.uuid_of(index))


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
