"""``megarl train``: join the ranks that a launcher started, or start them on this machine."""

from __future__ import annotations

import os
import sys

from megarl.config.algorithms import CustomAlgorithm
from megarl.config.schema import RunConfig
from megarl.core.errors import EXIT_OK
from megarl.launch.layout import warn_of_reward_nodes
from megarl.launch.local import Program, run_ranks
from megarl.launch.rendezvous import num_idle_nodes, read_rendezvous
from megarl.launch.watch import GO_ON


def start_training(config: RunConfig, *, fresh: bool) -> int:
    """Train to the end; returns the exit code. A run that was begun goes on, unless ``fresh``."""
    if config.run.device == "cpu":
        # Before anything imports torch: Megatron must not find a GPU that the run shall not use.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    record = read_rendezvous(os.environ, config)
    if record is None or (record.rank == 0 and record.launcher not in ("local", "ray")):
        sys.stderr.writelines(f"{warning}\n" for warning in warn_of_reward_nodes(config))
    if record is not None:
        from megarl.launch.rank import run_launched_rank, training

        return run_launched_rank(config, record, training(config, record, fresh=fresh))
    if num_idle := num_idle_nodes(os.environ):
        sys.stderr.write(
            f"warning: this job of Slurm has {num_idle + 1} nodes, but without srun all ranks run on this one.\n"
            "To use them all, write `srun megarl train ...`, one task for each rank, or let `megarl launch slurm` "
            "write the job.\n"
        )
    # Mistakes in data, rewards and tokenizer surface here, before any rank is started.
    from megarl.run.inputs import open_inputs, try_functions
    from megarl.run.resume import take_up

    inputs = open_inputs(config, with_prompts=True)
    if config.generates:
        try_functions(config, inputs)
    if isinstance(config.algorithm, CustomAlgorithm):
        from megarl.algorithms.choose import build_algorithm

        build_algorithm(config.algorithm)
    directory = take_up(config, fresh=fresh)
    if directory is None:
        return EXIT_OK
    try:
        command = ("train", str(directory.resolved_config))
        program = Program(command, directory.logs, GO_ON, config.launch.hang_timeout_seconds)
        return run_ranks(config.run.num_ranks, program)
    finally:
        directory.release()
