"""One rank from its first to its last moment: meet the others, build the run, run the loop."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

from megarl.config.schema import RunConfig
from megarl.core.errors import EXIT_INTERNAL, EXIT_OK, MegarlError
from megarl.launch.local import LAST_WORDS, LAUNCHER_PID
from megarl.launch.network import choose_interface
from megarl.launch.rendezvous import HANDED_OVER, RankRecord, hand_over
from megarl.run.stop import StopRequest, watch_signals

_PR_SET_PDEATHSIG = 1


def run_launched_rank(config: RunConfig, record: RankRecord, *, fresh: bool) -> int:
    """Run this process's rank; returns its exit code and leaves its last words where the launcher asked for them."""
    rank = record.rank
    stop = StopRequest()
    watch_signals(stop, lambda number: os._exit(128 + number))
    if record.launcher == "local":
        # Should megarl itself be killed, its ranks must not live on.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[LAUNCHER_PID]):  # it was killed before we asked to be told
            os._exit(EXIT_INTERNAL)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Megatron and torch warn about missing GPU packages and future deprecations; none is the user's to mend.
    warnings.filterwarnings("ignore")
    try:
        _train(config, record, stop, fresh=fresh)
        return EXIT_OK
    except MegarlError as error:
        _leave_last_words(rank, str(error), error.exit_code)
        code = error.exit_code
    except BaseException as error:
        trace = _write_trace(config, rank)
        message = f"MRL-9001 internal error in rank {rank}: {type(error).__name__}: {error}\nFull trace: {trace}"
        _leave_last_words(rank, message, EXIT_INTERNAL)
        code = EXIT_INTERNAL
    sys.stdout.flush()
    sys.stderr.flush()
    # Peers may be waiting for us in a collective; a normal exit would wait for them in turn.
    os._exit(code)


def _train(config: RunConfig, record: RankRecord, stop: StopRequest, *, fresh: bool) -> None:
    _prepare_environment(record)
    import torch

    from megarl.core.device import make_deterministic

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if config.run.deterministic:
        make_deterministic()
    from megarl.models.rendezvous import Rendezvous
    from megarl.models.setup import start_world, stop_world
    from megarl.run.resume import take_up
    from megarl.run.session import run_session

    rendezvous = Rendezvous(record.rank, record.size, record.local_rank, record.meeting, record.device_index)
    world = start_world(rendezvous, config.run.device, config.actor.parallel)
    # The local launcher claimed the run directory; under any other launcher the driver does, and holds it to the end.
    is_local = record.launcher == "local"
    claimed = take_up(config, fresh=fresh) if world.is_driver and not is_local else None
    is_finished = world.broadcast(claimed is None and not is_local)
    if not is_finished:
        run_session(config, world, Path(config.run.dir) / config.run.name, stop, inputs_checked=is_local)
    if claimed is not None:
        claimed.release()
    stop_world()


def _prepare_environment(record: RankRecord) -> None:
    """What code of others reads from the environment, whoever started this rank."""
    interface = choose_interface(record, os.environ)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    os.environ.update({name: value for name, value in hand_over(record).items() if name != HANDED_OVER})


def _leave_last_words(rank: int, message: str, exit_code: int) -> None:
    path = os.environ.get(LAST_WORDS)
    if path is None:
        sys.stderr.write(f"{message}\n")
        return
    words = {"rank": rank, "message": message, "exit_code": exit_code, "time": time.monotonic()}
    Path(path).write_text(json.dumps(words), encoding="utf-8")


def _write_trace(config: RunConfig, rank: int) -> Path:
    path = Path(config.run.dir) / config.run.name / "logs" / f"rank_{rank}.trace"
    with contextlib.suppress(OSError):  # a full disk must not silence the message itself
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(traceback.format_exc(), encoding="utf-8")
    return path
