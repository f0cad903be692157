"""``megarl train``: join the ranks that a launcher started, or start them on this machine."""

from __future__ import annotations

import os

from megarl.config.algorithms import CustomAlgorithm
from megarl.config.schema import RunConfig
from megarl.core.errors import EXIT_OK, ConfigError
from megarl.launch.local import Program, run_ranks
from megarl.run.resume import take_up


def start_training(config: RunConfig, *, fresh: bool) -> int:
    """Train to the end; returns the exit code. A run that was begun goes on, unless ``fresh``."""
    if config.run.device == "cpu":
        # Before anything imports torch: Megatron must not find a GPU that the run shall not use.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from megarl.launch.rank import run_launched_rank, training

        return run_launched_rank(config, launched_size(config), training(config, fresh=fresh))
    # Mistakes in data, rewards and tokenizer surface here, before any rank is started.
    from megarl.run.inputs import open_inputs, try_rewards

    inputs = open_inputs(config, with_prompts=True)
    if config.generates:
        try_rewards(config, inputs)
    if isinstance(config.algorithm, CustomAlgorithm):
        from megarl.algorithms.choose import build_algorithm

        build_algorithm(config.algorithm)
    directory = take_up(config, fresh=fresh)
    if directory is None:
        return EXIT_OK
    try:
        way_out = "Run the same command to go on from the last checkpoint."
        program = Program(("train", str(directory.resolved_config)), directory.logs, way_out)
        return run_ranks(config.run.num_ranks, program)
    finally:
        directory.release()


def launched_size(config: RunConfig) -> int:
    """How many ranks the launcher started, which must be as many as the configuration is for."""
    size = int(os.environ["WORLD_SIZE"])
    if size != config.run.num_ranks:
        raise ConfigError(
            "MRL-1110",
            f"the launcher started {size} ranks, but run.num_ranks={config.run.num_ranks}. "
            f"Add run.num_ranks={size} to the command, or start {config.run.num_ranks} ranks.",
        )
    return size
