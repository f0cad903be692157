"""Real ranks on gloo for tests. Megatron takes seconds to import, so ranks are forked from a server that has done so.

A job is a module-level function ``job(world, **arguments)``; fresh ranks run it in a world of the asked layout, and the
test gets the list of the ranks' results.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.distributed.preloaded"])


class Gang:
    """``size`` ranks for every job."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(
        self,
        job: Callable[..., Any],
        tp_size: int = 1,
        pp_size: int = 1,
        parallel: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        """Every rank's result, in rank order; a rank's exception is raised here with its traceback.

        ``parallel`` gives all sizes of a layout; ``tp_size`` and ``pp_size`` are short for the most usual ones.
        """
        sizes = parallel if parallel is not None else {"tp_size": tp_size, "pp_size": pp_size}
        with socket.create_server(("127.0.0.1", 0), backlog=self.size) as meeting:
            pipes, processes = [], []
            for rank in range(self.size):
                ours, theirs = _CONTEXT.Pipe(duplex=False)
                work = (job, sizes, meeting, arguments)
                process = _CONTEXT.Process(target=_serve, args=(theirs, rank, self.size, work), daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            answers = [_answer(pipe) for pipe in pipes]
            for process in processes:
                process.join(timeout=10)
                process.kill()
        for rank, (failed, result) in enumerate(answers):
            if failed:
                raise AssertionError(f"rank {rank} of {self.size} failed:\n{result}")
        return [result for _, result in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return True, "it died without a word"


def _serve(pipe: Connection, rank: int, size: int, work: tuple[Any, ...]) -> None:
    from megarl.config.parallel import ParallelSettings
    from megarl.models.rendezvous import Rendezvous
    from megarl.models.setup import lay_out, start_world

    job, sizes, meeting, arguments = work
    try:
        parallel = ParallelSettings(**sizes)
        place = f"inherited://127.0.0.1:{meeting.getsockname()[1]}/{meeting.detach()}"
        world = start_world(Rendezvous(rank, size, rank, place), "cpu", parallel)
        with lay_out(world, parallel).active():
            pipe.send((False, job(world, **arguments)))
        # nobody may leave while others still need it for their last collective
        world.barrier()
    except BaseException:
        # other ranks may wait in a collective for us: leave, so that their sockets close
        pipe.send((True, traceback.format_exc()))
    pipe.close()
    # an interpreter full of Megatron takes seconds to tidy up, for nothing
    os._exit(0)
