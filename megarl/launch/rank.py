"""One rank from its first to its last moment: meet the others, build the run, run the loop."""

from __future__ import annotations

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
from megarl.launch.local import INIT_METHOD, LAST_WORDS, LAUNCHER, LAUNCHER_PID
from megarl.run.directory import claim

_PR_SET_PDEATHSIG = 1


def run_launched_rank(config: RunConfig, size: int) -> int:
    """Run this process's rank; returns its exit code and leaves its last words where the launcher asked for them."""
    rank = int(os.environ["RANK"])
    if os.environ.get(LAUNCHER) == "local":
        # Should megarl itself be killed, its ranks must not live on.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(os.environ[LAUNCHER_PID]):  # it was killed before we asked to be told
            os._exit(EXIT_INTERNAL)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # Megatron and torch warn about missing GPU packages and future deprecations; none is the user's to mend.
    warnings.filterwarnings("ignore")
    try:
        _train(config, rank, size)
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


def _train(config: RunConfig, rank: int, size: int) -> None:
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    from megarl.models.setup import Rendezvous, start_world, stop_world
    from megarl.run.session import run_session

    parallel = config.actor.parallel
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    rendezvous = Rendezvous(rank, size, local_rank, os.environ.get(INIT_METHOD, "env://"))
    world = start_world(rendezvous, config.run.device, parallel.tp_size, parallel.pp_size)
    # The local launcher claimed the run directory; under any other launcher the driver does, and holds it to the end.
    is_local = os.environ.get(LAUNCHER) == "local"
    claimed = claim(config) if rank == 0 and not is_local else None
    run_session(config, world, Path(config.run.dir) / config.run.name, inputs_checked=is_local)
    if claimed is not None:
        claimed.release()
    stop_world()


def _leave_last_words(rank: int, message: str, exit_code: int) -> None:
    path = os.environ.get(LAST_WORDS)
    if path is None:
        sys.stderr.write(f"{message}\n")
        return
    words = {"rank": rank, "message": message, "exit_code": exit_code, "time": time.monotonic()}
    Path(path).write_text(json.dumps(words), encoding="utf-8")


def _write_trace(config: RunConfig, rank: int) -> Path:
    path = Path(config.run.dir) / config.run.name / "logs" / f"rank_{rank}.trace"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(traceback.format_exc(), encoding="utf-8")
    return path
