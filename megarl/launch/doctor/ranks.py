"""The doctor as a rank under a launcher: reports first, by the store of the meeting; then what takes everybody.

Whatever fails, every rank ends in bounded time, and what is known by then is told: by the driver if it can be reached,
else by whoever could not reach it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl.core.errors import EngineError
from megarl.core.step_ranges import step_ranges
from megarl.launch.doctor.board import Board
from megarl.launch.doctor.compare import Report, compare
from megarl.launch.doctor.doors import KNOCK_SECONDS, knock, open_door
from megarl.launch.doctor.finding import Finding, as_finding
from megarl.launch.doctor.together import MAX_ROUNDS, check_together
from megarl.launch.rendezvous import RankRecord
from megarl.models.rendezvous import Rendezvous, reach

if TYPE_CHECKING:
    from megarl.core.world import World

# Everybody is there when ranks connect: who does not answer by then will not.
_MESH_SECONDS = 60.0
_MAX_NAMED = 3
_SECONDS_TO_PART = 10.0
# For what takes no time unless a machine is very busy.
_SLACK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Examined:
    """What is to be told: reports of the ranks that are known, and what concerns all of them."""

    reports: Mapping[int, Report]
    together: Sequence[Finding]


def examine_ranks(record: RankRecord, report: Report, directory: Path, seconds: float) -> Examined | None:
    """What this rank has to tell; None if the driver does. ``seconds`` is how long ranks wait for each other."""
    numbers = (record.rank, record.size, record.local_rank)
    try:
        store = reach(Rendezvous(*numbers, record.meeting, join_timeout=timedelta(seconds=seconds)))
        board = Board(store, record.rank)
        with open_door(os.environ.get("GLOO_SOCKET_IFNAME"), record.master_address) as door:
            board.leave("door", door)
            board.leave("report", report.to_tree())
            if record.rank == 0:
                return _lead(record, board, directory, seconds)
            _follow(record, board, directory, seconds)
        return None
    except EngineError as error:
        lost = as_finding("network", error)
    except TimeoutError as error:
        lost = Finding("network", "error", str(error), "look at its output")
    except RuntimeError as error:  # torch's, if the store is gone
        lost = Finding("network", "error", f"the meeting with rank 0 ended: {_first_line(error)}", "look at its output")
    return Examined({record.rank: report}, [lost])


def _follow(record: RankRecord, board: Board, directory: Path, seconds: float) -> None:
    """Every rank but the driver does what the driver says. Its last note lets the driver go."""
    problem = ""
    if board.hear("knock", 2 * seconds + _SLACK_SECONDS):
        board.leave("unreached", _unreached(record, board))
        if board.hear("connect", _SLACK_SECONDS + KNOCK_SECONDS):
            problem = _connect(record, board, directory)[1]
    board.leave("done", problem)


def _lead(record: RankRecord, board: Board, directory: Path, seconds: float) -> Examined:
    """The driver's part."""
    came = board.collect("report", range(record.size), seconds)
    reports = {rank: Report.from_tree(tree) for rank, tree in came.items()}
    together = compare(reports)
    others = [rank for rank in reports if rank != 0]
    missing = [rank for rank in range(record.size) if rank not in reports]
    barred = [rank for rank, one in reports.items() if not one.may_connect]
    board.decide("knock", not missing and not barred)
    if missing or barred:
        together += _not_tried(record, missing, barred, seconds)
        board.collect("done", others, _SECONDS_TO_PART)
        return Examined(reports, together)
    own = _unreached(record, board)
    unreached = {0: own, **board.collect("unreached", others, _SLACK_SECONDS + KNOCK_SECONDS)}
    lines = [
        f"rank {rank} ({reports[rank].host}) does not reach rank {peer}, {why}"
        for rank, peers in unreached.items()
        for peer, why in peers.items()
    ]
    lines += [
        f"rank {rank} ({reports[rank].host}) does not answer any more" for rank in others if rank not in unreached
    ]
    board.decide("connect", not lines)
    if not lines:
        found, problem = _connect(record, board, directory, [reports[rank].host for rank in reports])
        together += found
        # a rank that waits for another that failed gives up a while after it
        told = {0: problem, **board.collect("done", others, _MESH_SECONDS + _SLACK_SECONDS)}
        lines += [f"rank {rank} ({reports[rank].host}): {why}" for rank, why in told.items() if why]
        lines += [f"rank {rank} ({reports[rank].host}) does not answer any more" for rank in others if rank not in told]
    else:
        board.collect("done", others, _SECONDS_TO_PART)
    if lines:
        together.append(_broken(lines))
    return Examined(reports, together)


def _unreached(record: RankRecord, board: Board) -> dict[str, str]:
    """Peers of this rank that do not let it in, and why: all others, or the next sixteen in large runs."""
    peers = [(record.rank + shift) % record.size for shift in range(1, min(record.size, MAX_ROUNDS + 1))]
    doors = board.collect("door", peers, _SLACK_SECONDS)  # everybody left one before its report
    reached = knock({rank: (door[0], door[1]) if door else None for rank, door in doors.items()})
    return {str(rank): why for rank, why in reached.items()}


def _not_tried(record: RankRecord, missing: list[int], barred: list[int], seconds: float) -> list[Finding]:
    found = []
    if missing:
        text = f"of {record.size} ranks {len(missing)} did not come within {seconds:.0f} s: rank {step_ranges(missing)}"
        remedy = (
            "look at the output of the nodes that are missing: did their launcher start, and does it name the same "
            "master and the same number of nodes?"
        )
        found.append(Finding("network", "error", text, remedy))
    if barred:
        text = f"not tried, because of the interface of rank {step_ranges(barred)}"
        found.append(Finding("network", "error", text, "mend the interface first"))
    return found


def _broken(lines: Sequence[str]) -> Finding:
    """Ranks that met, and do not reach each other."""
    more = f"; and {len(lines) - _MAX_NAMED} more" if len(lines) > _MAX_NAMED else ""
    text = f"the ranks met, but not all reach each other: {'; '.join(lines[:_MAX_NAMED])}{more}"
    remedy = (
        "unset GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, or set them to the network that all nodes share; open all "
        "ports between the nodes"
    )
    return Finding("network", "error", text, remedy)


def _connect(record: RankRecord, board: Board, directory: Path, hosts: Sequence[str] = ()) -> tuple[list[Finding], str]:
    """What all ranks find together, on the driver, which knows the hosts; and what went wrong. Collective."""
    found: list[Finding] = []
    try:
        dist.init_process_group(
            backend="gloo",
            store=board.mesh,
            rank=record.rank,
            world_size=record.size,
            timeout=timedelta(seconds=_MESH_SECONDS),
        )
        world = _world(record)
        names: list[str] = world.broadcast(list(hosts) if world.is_driver else None)
        for finding in check_together(world, names, directory):
            found.append(finding)
        world.barrier()
        dist.destroy_process_group()
    except RuntimeError as error:
        return found, _first_line(error)
    return found, ""


def _world(record: RankRecord) -> World:
    """All ranks, with no model laid out over them."""
    from megarl.core.world import Axis, World

    group = dist.group.WORLD
    assert group is not None, "joined"
    whole = Axis(0, 1, group)
    return World(
        record.rank, record.size, record.local_rank, torch.device("cpu"), group,
        tp=whole, pp=whole, dp=whole, cp=whole, ep=whole, etp=whole, edp=whole, dp_rank_of=(),
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
