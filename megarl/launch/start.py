"""``megarl train``: join the ranks that a launcher started, or start them on this machine."""

from __future__ import annotations

import os

from megarl.config.algorithms import CustomAlgorithm
from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.launch.local import run_ranks
from megarl.run.directory import claim


def start_training(config: RunConfig) -> int:
    """Train to the end; returns the exit code."""
    if config.run.device == "cpu":
        # Before anything imports torch: Megatron must not find a GPU that the run shall not use.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from megarl.launch.rank import run_launched_rank

        return run_launched_rank(config, _launched_size(config))
    # Mistakes in data, rewards and tokenizer surface here, before any rank is started.
    from megarl.run.inputs import open_inputs

    open_inputs(config, with_prompts=True)
    if isinstance(config.algorithm, CustomAlgorithm):
        from megarl.algorithms.choose import build_algorithm

        build_algorithm(config.algorithm)
    directory = claim(config)
    try:
        return run_ranks(config.run.num_ranks, directory)
    finally:
        directory.release()


def _launched_size(config: RunConfig) -> int:
    size = int(os.environ["WORLD_SIZE"])
    if size != config.run.num_ranks:
        raise ConfigError(
            "MRL-1110",
            f"the launcher started {size} ranks, but run.num_ranks={config.run.num_ranks}. "
            f"Add run.num_ranks={size} to the command, or start {config.run.num_ranks} ranks.",
        )
    return size
