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
from megarl.launch.network import LOOPBACK, choose_interface, own_address, resolve
from megarl.launch.rendezvous import HANDED_OVER, RankRecord, hand_over
from megarl.launch.watch import JOIN
from megarl.run.stop import StopRequest, stopped_at_the_start, watch_signals

if TYPE_CHECKING:
    from megarl.core.world import World
    from megarl.models.rendezvous import Meeting

_EXIT_BY_SIGNAL = 128
_PR_SET_PDEATHSIG = 1


# lets this rank write into a directory of logs
OpenLogs = Callable[[Path], None]
# what a rank does once it has met the others
Work = Callable[["World", StopRequest, OpenLogs], None]


def run_launched_rank(config: RunConfig, record: RankRecord, work: Work) -> int:
    """Run this process's rank; returns its exit code. Its last words go to who watches over it."""
    stop = StopRequest()
    stop.leaves_at_once = True  # until the ranks have met there is nothing to save
    line: RankLine | None = None

    def leave(number: int) -> None:
        if not stop.leaves_at_once:
            os._exit(_EXIT_BY_SIGNAL + number)
        told = stopped_at_the_start(number)
        if line is not None:
            line.leave(str(told), _exit_code(told, record))
        os._exit(_exit_code(told, record))

    watch_signals(stop, leave)
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
        code = _exit_code(error, record)
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


def _exit_code(error: MegarlError, record: RankRecord) -> int:
    """Only who starts ranks again by himself has to know whether it helps."""
    is_plain = isinstance(error, PreemptedIdle) and record.launcher == "local"
    return Preempted.exit_code if is_plain else error.exit_code


def _watched(config: RunConfig, record: RankRecord) -> RankLine:
    """The line to who watches over this rank: the parent that started it, or a guard that is started here."""
    if record.launcher == "local":
        return RankLine(socket.socket(fileno=int(os.environ.pop(LINE))))
    resolve(record.master_address)  # or it says that there is no such host, before anything slow is loaded
    address = LOOPBACK if record.num_nodes == 1 else own_address(record.master_address)
    return start_guard(record, address, config.launch.hang_timeout_seconds, config.launch.join_timeout_seconds)


def _meet_and_work(config: RunConfig, record: RankRecord, stop: StopRequest, line: RankLine, work: Work) -> None:
    _prepare_environment(record)
    import torch

    from megarl.core.device import make_deterministic

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.run.deterministic:
        make_deterministic()
    from megarl.models.setup import connect_world, stop_world

    whereabouts.enter(JOIN)
    world = connect_world(_meet(config, record, line), config.run.device, config.actor.parallel)
    stop.leaves_at_once = False
    work(world, stop, partial(_open_logs, record=record, line=line))
    stop_world()


def _meet(config: RunConfig, record: RankRecord, line: RankLine) -> Meeting:
    """All ranks are there and want the same. From the moment that rank 0 is there, one watch watches over all."""
    from megarl.launch.agreement import require_agreement, terms
    from megarl.models.rendezvous import Meeting, Rendezvous
    from megarl.run.progress import config_digest

    patience = timedelta(seconds=config.launch.join_timeout_seconds)
    numbers = (record.rank, record.size, record.local_rank)
    own = terms(config)
    meeting = Meeting(Rendezvous(*numbers, record.meeting, record.device_index, patience), config_digest(own))
    if record.launcher != "local":  # the local launcher watches; under any other one the driver's guard does
        if record.rank == 0:
            meeting.leave_note("watch", line.where_the_watch_listens())
        whereabouts.tell({"hub": meeting.read_notes(["watch"])[0]})
    require_agreement(meeting, own)
    return meeting


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
    os.environ.update({name: value for name, value in hand_over(record).items() if name != HANDED_OVER})


def _write_trace(config: RunConfig, rank: int) -> Path:
    path = Path(config.run.dir) / config.run.name / "logs" / f"rank_{rank}.trace"
    with contextlib.suppress(OSError):  # a full disk must not silence the message itself
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
    return path
