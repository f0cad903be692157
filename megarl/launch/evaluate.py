"""``megarl eval``: join the ranks that a launcher started, or start them on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from megarl.config.schema import RunConfig
from megarl.core import whereabouts
from megarl.core.world import World
from megarl.launch.local import Program, run_ranks
from megarl.launch.rendezvous import RankRecord, read_rendezvous
from megarl.run.candidate import Candidate
from megarl.run.evaluation_plan import moved_to, new_directory
from megarl.run.inputs import open_inputs, try_functions
from megarl.run.stop import SIGNALS, StopRequest

# Where the evaluation's files go, if whoever started the ranks has decided it.
_DIRECTORY = "MEGARL_EVAL_DIRECTORY"


def start_evaluation(config: RunConfig, candidate: Candidate, out: Path | None, arguments: Sequence[str]) -> int:
    """Evaluate; returns the exit code. ``arguments`` are the words of the command, for the ranks."""
    if config.run.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    record = read_rendezvous(os.environ, config)
    if record is not None:
        return _join(config, record, candidate, out)
    # Mistakes in data, rewards and tokenizer surface here, before any rank is started.
    try_functions(config, open_inputs(config, with_prompts=True, with_training=False))
    directory = new_directory(config)
    own = {_DIRECTORY: str(directory)}
    timeout = config.launch.hang_timeout_seconds
    program = Program(arguments, directory / "logs", "Run the same command again.", timeout, own)
    return run_ranks(config.run.num_ranks, program)


def _join(config: RunConfig, record: RankRecord, candidate: Candidate, out: Path | None) -> int:
    from megarl.launch.rank import OpenLogs, run_launched_rank

    given = os.environ.get(_DIRECTORY)

    def work(world: World, stop: StopRequest, open_logs: OpenLogs) -> None:
        from megarl.run.evaluation_session import run_evaluation

        _end_at_once(stop)
        directory = given or world.broadcast(str(new_directory(config)) if world.is_driver else None)
        open_logs(Path(directory) / "logs")
        whereabouts.enter("build")
        run_evaluation(config, candidate, world, Path(directory), out)

    return run_launched_rank(moved_to(config, Path(given)) if given else config, record, work)


def _end_at_once(stop: StopRequest) -> None:
    """An evaluation that is asked to stop has nothing to save."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if stop.received is not None:
        signal.raise_signal(stop.received)
