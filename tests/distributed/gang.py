"""Real ranks on gloo for tests: worker processes that import Megatron once and then run many small jobs.

A job is a module-level function ``job(world, **arguments)``; every rank runs it in a fresh world of the asked layout,
and the test gets the list of the ranks' results.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Gang:
    """``size`` worker processes."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.size = size
        self._directory = tempfile.TemporaryDirectory(prefix="megarl-gang-")
        self._num_jobs = 0
        self._failed = False
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        """False after a failed job, too: the ranks are on their way out then, even if they still run."""
        return not self._failed and all(process.is_alive() for process in self._processes)

    def run(self, job: Callable[..., Any], tp_size: int = 1, pp_size: int = 1, **arguments: Any) -> list[Any]:
        """Every rank's result, in rank order; a rank's exception is raised here with its traceback."""
        self._num_jobs += 1
        store = Path(self._directory.name) / f"store_{self._num_jobs}"
        for pipe in self._pipes:
            pipe.send((job, tp_size, pp_size, str(store), arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        for rank, (failed, result) in enumerate(answers):
            if failed:
                self._failed = True
                raise AssertionError(f"rank {rank} of {self.size} failed:\n{result}")
        return [result for _, result in answers]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            process.kill()
        self._directory.cleanup()


def _serve(pipe: Connection, rank: int, size: int) -> None:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
    import warnings

    warnings.filterwarnings("ignore")
    import torch

    torch.set_num_threads(1)
    from megarl.models.setup import Rendezvous, start_world, stop_world

    while True:
        try:
            job, tp_size, pp_size, store, arguments = pipe.recv()
        except EOFError:
            # an interpreter full of Megatron takes seconds to tidy up, for nothing
            os._exit(0)
        try:
            world = start_world(Rendezvous(rank, size, rank, f"file://{store}"), "cpu", tp_size, pp_size)
            result = job(world, **arguments)
            pipe.send((False, result))
            stop_world()
        except BaseException:
            pipe.send((True, traceback.format_exc()))
            # other ranks may wait in a collective for us: leave, so that their sockets close
            return
