"""Checks that need all ranks: do they reach each other, how fast, do their clocks agree, do they share the run's disk?

Every function is a collective. What goes wrong on the way is a finding of who noticed it.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.core.world import World
from megarl.launch.doctor.finding import Finding

_PAYLOAD_BYTES = 4 * 2**20
_NUM_TRIES = 3  # the best counts: a busy machine is no slow network
_SLOW_GBIT = 1.0
_SKEW_SECONDS = 1.0
# Enough to find a bad link between any two of a few nodes, and not to take minutes on many.
MAX_ROUNDS = 16


def check_together(world: World, hosts: Sequence[str], directory: Path) -> Iterator[Finding]:
    """The driver's findings, one after the other: where a later one fails, those before it are known."""
    for check in (partial(_shared_directory, directory=directory), _clocks, _bandwidth):
        finding = check(world, hosts)
        if world.is_driver:
            yield finding


def _bandwidth(world: World, hosts: Sequence[str]) -> Finding:
    """Every rank sends to every other (to the next sixteen, in large runs); all pairs of a round at once."""
    own: list[float] = []
    sent, received = torch.zeros(_PAYLOAD_BYTES, dtype=torch.uint8), torch.empty(_PAYLOAD_BYTES, dtype=torch.uint8)
    rounds = range(1, min(world.size, MAX_ROUNDS + 1))
    for shift in rounds:
        seconds = []
        for _ in range(_NUM_TRIES):
            world.barrier()
            start = time.perf_counter()
            sending = dist.isend(sent, (world.rank + shift) % world.size)
            dist.recv(received, (world.rank - shift) % world.size)
            if sending is not None:
                sending.wait()
            seconds.append(time.perf_counter() - start)
        own.append(8e-9 * _PAYLOAD_BYTES / min(seconds))
    gathered = world.gather(own)
    if not gathered or not own:
        return Finding("network", "ok", "one rank, nothing to reach")
    slowest, rank, shift = min(
        (rate, rank, rounds[i]) for rank, rates in enumerate(gathered) for i, rate in enumerate(rates)
    )
    peer = (rank - shift) % world.size
    pair = f"rank {peer} ({hosts[peer]}) to rank {rank} ({hosts[rank]})"
    text = f"all {world.size} ranks reach each other; slowest link {slowest:.2f} Gbit/s, {pair}"
    if slowest < _SLOW_GBIT and len(set(hosts)) > 1:
        return Finding("network", "warning", text, "is it the right interface? Set GLOO_SOCKET_IFNAME on all nodes")
    return Finding("network", "ok", text)


def _clocks(world: World, hosts: Sequence[str]) -> Finding:
    """Everybody's clock at one moment: right after a barrier, whose length is the error."""
    world.barrier()
    before = time.time()
    world.barrier()
    gathered = world.gather([before, time.time()])
    if gathered is None:
        return Finding("clocks", "ok", "")
    ours = gathered[0]
    skews = [max(0.0, ours[0] - theirs[1], theirs[0] - ours[1]) for theirs in gathered]
    largest = max(skews)
    if largest > _SKEW_SECONDS:
        text = f"the clock of {hosts[skews.index(largest)]} is {largest:.0f} s off rank 0's"
        return Finding("clocks", "warning", text, "start ntpd or chronyd: times in logs and checkpoints would mislead")
    return Finding("clocks", "ok", f"agree within {max(_SKEW_SECONDS, largest):.0f} s")


def _shared_directory(world: World, hosts: Sequence[str], directory: Path) -> Finding:
    """The driver's file must be seen by all, and theirs by the driver: checkpoints are written by all ranks."""
    name = world.broadcast(f".megarl-doctor-{secrets.token_hex(8)}" if world.is_driver else None)
    marks = [directory / f"{name}.{rank}" for rank in range(world.size)]
    problem = ""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        marks[world.rank].write_text(name, encoding="ascii")
    except OSError as error:
        problem = f"cannot be written: {error.strerror}"
    world.barrier()
    if not problem and not _is_there(marks[0]):
        problem = "is another directory there"
    problems = world.gather(problem)
    unseen = [rank for rank, mark in enumerate(marks) if not _is_there(mark)]
    world.barrier()
    with contextlib.suppress(OSError):  # it may not be there, on a disk that cannot be written
        marks[world.rank].unlink()
    if problems is None:
        return Finding("shared disk", "ok", "")
    bad = {hosts[rank]: why for rank, why in enumerate(problems) if why} | {
        hosts[rank]: "is another directory there" for rank in unseen if not problems[rank]
    }
    if bad:
        text = f"{directory} " + "; ".join(f"{why} ({host})" for host, why in bad.items())
        return Finding("shared disk", "error", text, "set run.dir to a directory that all nodes mount at the same path")
    return Finding("shared disk", "ok", f"{directory} is one directory for all ranks")


def _is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a directory that may not be entered
        return False
