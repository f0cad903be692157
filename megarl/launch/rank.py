"""One rank from its first to its last moment: meet the others, build the run, run the loop."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.config.schema import RunConfig
from megarl.core import whereabouts
from megarl.core.errors import EXIT_INTERNAL, EXIT_OK, MegarlError, Preempted, PreemptedIdle
from megarl.launch.guard import start_guard
from megarl.launch.line import LINE, RankLine
from megarl.launch.local import LAUNCHER_PID
from megarl.launch.network import LOOPBACK, choose_interface, own_address
from megarl.launch.rendezvous import HANDED_OVER, RankRecord, hand_over
from megarl.run.stop import StopRequest, watch_signals

if TYPE_CHECKING:
    from megarl.core.world import World

_PR_SET_PDEATHSIG = 1


# lets this rank write into a directory of logs
OpenLogs = Callable[[Path], None]
# what a rank does once it has met the others
Work = Callable[["World", StopRequest, OpenLogs], None]


def run_launched_rank(config: RunConfig, record: RankRecord, work: Work) -> int:
    """Run this process's rank; returns its exit code. Its last words go to who watches over it."""
    stop = StopRequest()
    watch_signals(stop, lambda number: os._exit(128 + number))
    # Should the launcher be killed, its ranks must not live on.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.environ.get(LAUNCHER_PID)  # megarl's own launchers say who they are
    if parent is not None and os.getppid() != int(parent):  # killed before we asked to be told
        os._exit(EXIT_INTERNAL)
    line = _watched(config, record)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Megatron and torch warn about missing GPU packages and future deprecations; none is the user's to mend.
    warnings.filterwarnings("ignore")
    try:
        _meet_and_work(config, record, stop, line, work)
        line.leave(None, EXIT_OK)
        return EXIT_OK
    except MegarlError as error:
        # only who starts ranks again by himself has to know whether it helps
        is_plain = isinstance(error, PreemptedIdle) and record.launcher == "local"
        code = Preempted.exit_code if is_plain else error.exit_code
        line.leave(str(error), code)
    except BaseException as error:
        trace = _write_trace(config, record.rank)
        what = f"MRL-9001 internal error in rank {record.rank}: {type(error).__name__}: {error}"
        line.leave(f"{what}\nFull trace: {trace}", EXIT_INTERNAL)
        code = EXIT_INTERNAL
    sys.stdout.flush()
    sys.stderr.flush()
    # Peers may be waiting for us in a collective; a normal exit would wait for them in turn.
    os._exit(code)


def _watched(config: RunConfig, record: RankRecord) -> RankLine:
    """The line to who watches over this rank: the parent that started it, or a guard that is started here."""
    if record.launcher == "local":
        return RankLine(socket.socket(fileno=int(os.environ.pop(LINE))))
    address = LOOPBACK if record.num_nodes == 1 else own_address(record.master_address)
    timeout = config.launch.hang_timeout_seconds
    return start_guard(record.rank, record.local_rank, record.size, address, timeout)


def _meet_and_work(config: RunConfig, record: RankRecord, stop: StopRequest, line: RankLine, work: Work) -> None:
    _prepare_environment(record)
    import torch

    from megarl.core.device import make_deterministic

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.run.deterministic:
        make_deterministic()
    from megarl.models.rendezvous import Rendezvous
    from megarl.models.setup import start_world, stop_world

    whereabouts.enter("join")
    numbers = (record.rank, record.size, record.local_rank)
    patience = timedelta(seconds=config.launch.join_timeout_seconds)
    rendezvous = Rendezvous(*numbers, record.meeting, record.device_index, patience)
    world = start_world(rendezvous, config.run.device, config.actor.parallel)
    if record.launcher != "local":  # the local launcher watches; under any other one the driver's guard does
        whereabouts.tell({"hub": world.broadcast(line.where_the_watch_listens() if world.is_driver else None)})
    work(world, stop, partial(_open_logs, record=record, line=line))
    stop_world()


def training(config: RunConfig, record: RankRecord, *, fresh: bool) -> Work:
    """Train to the end, or to where somebody stops it."""

    def work(world: World, stop: StopRequest, open_logs: OpenLogs) -> None:
        from megarl.run.resume import take_up
        from megarl.run.session import run_session

        # The local launcher claimed the run directory; under any other one the driver does, and holds it to the end.
        is_local = record.launcher == "local"
        claimed = take_up(config, fresh=fresh) if world.is_driver and not is_local else None
        is_finished = world.broadcast(claimed is None and not is_local)
        if not is_finished:
            directory = Path(config.run.dir) / config.run.name
            open_logs(directory / "logs")
            whereabouts.enter("build")
            run_session(config, world, directory, stop, inputs_checked=is_local)
        if claimed is not None:
            claimed.release()

    return work


def _open_logs(logs: Path, record: RankRecord, line: RankLine) -> None:
    """Only the driver speaks on the terminal; what the others write is in their logs, whoever started them."""
    logs.mkdir(parents=True, exist_ok=True)
    if record.rank > 0 and record.launcher != "local":
        with open(logs / f"rank_{record.rank}.log", "ab") as log:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    line.open_stacks(logs / f"stacks_rank_{record.rank}.txt")
    whereabouts.tell({"logs": str(logs)})


def _prepare_environment(record: RankRecord) -> None:
    """What code of others reads from the environment, whoever started this rank."""
    interface = choose_interface(record, os.environ)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    # torch warns of hosts without a name, which do no harm
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.update({name: value for name, value in hand_over(record).items() if name != HANDED_OVER})


def _write_trace(config: RunConfig, rank: int) -> Path:
    path = Path(config.run.dir) / config.run.name / "logs" / f"rank_{rank}.trace"
    with contextlib.suppress(OSError):  # a full disk must not silence the message itself
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
    return path
