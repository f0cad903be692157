"""``megarl launch LAUNCHER CONFIG``: what the command line says about each launcher."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megarl.core.errors import EXIT_OK, ConfigError

Command = Callable[[argparse.Namespace], int]


class AddCommand(Protocol):
    """How the command line adds a command that takes CONFIG and KEY=VALUE."""

    def __call__(self, commands: Any, name: str, command: Command, text: str, /) -> argparse.ArgumentParser:
        """The command's parser."""


def add_launchers(launchers: Any, add: AddCommand) -> None:
    """All commands below ``megarl launch``."""
    ray = add(launchers, "ray", _launch_on_ray, "train on a Ray cluster; a command for ray job submit")
    ray.add_argument("--nodes", type=int, help="how many nodes; as few as hold all ranks if not given")
    ray.add_argument("--fresh", action="store_true", help="start over; what is there moves to NAME.1")
    ray.add_argument("--doctor", action="store_true", help="do not train: say whether all ranks could")
    slurm = add(launchers, "slurm", _launch_on_slurm, "write the sbatch file of a run, and submit it if asked to")
    slurm.add_argument("--nodes", metavar="N", type=int, required=True, help="how many nodes")
    slurm.add_argument("--ranks-per-node", metavar="N", type=int, help="run.num_ranks / nodes if not given")
    slurm.add_argument("--time", metavar="LIMIT", help="Slurm's time limit; 24:00:00 if not given")
    slurm.add_argument("--save-before", metavar="SECONDS", type=int, default=300, help="save so long before; 300")
    slurm.add_argument("--cpus-per-rank", metavar="N", type=int, help="cores of each rank, its servers and rewards")
    slurm.add_argument("--partition", metavar="NAME", help="Slurm's partition")
    slurm.add_argument("--out", metavar="FILE", type=Path, help="the file to write; to the terminal if not given")
    slurm.add_argument("--submit", action="store_true", help="hand it to sbatch")
    slurm.add_argument("--doctor", action="store_true", help="a job that says whether all ranks could train")


def _launch_on_ray(arguments: argparse.Namespace) -> int:
    from megarl.config.load import load_config
    from megarl.config.preflight import require_inputs
    from megarl.launch.ray_plan import require_shared_directory

    if arguments.nodes is not None and arguments.nodes < 1:
        arguments.parser.error(f"--nodes must be 1 or more, not {arguments.nodes}")
    if arguments.doctor and arguments.fresh:
        arguments.parser.error("--fresh is for training, and --doctor does not train")
    config = load_config(arguments.config, arguments.overrides)
    require_shared_directory(config)
    if not arguments.doctor:
        require_inputs(config)
    try:
        from megarl.launch.on_ray import examine_on_ray, train_on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "MRL-1670",
            "megarl launch ray needs the package ray, which is not installed here.\n"
            'Install it on all nodes: pip install --constraint constraints.txt "megarl[ray]"',
        ) from None
    words = [str(arguments.config), *arguments.overrides]
    if arguments.doctor:
        return examine_on_ray(config, ["doctor", *words], asked_nodes=arguments.nodes)
    return train_on_ray(config, ["train", *words], asked_nodes=arguments.nodes, fresh=arguments.fresh)


def _launch_on_slurm(arguments: argparse.Namespace) -> int:
    from megarl.config.load import load_config
    from megarl.config.preflight import require_inputs
    from megarl.launch.slurm import DOCTOR_TIME, SlurmRequest, render, render_doctor, submit, write_script

    config = load_config(arguments.config, arguments.overrides)
    if not arguments.doctor:
        require_inputs(config)
    request = SlurmRequest(
        arguments.nodes,
        arguments.ranks_per_node,
        arguments.time or (DOCTOR_TIME if arguments.doctor else "24:00:00"),
        arguments.save_before,
        arguments.partition,
        arguments.cpus_per_rank,
    )
    write = render_doctor if arguments.doctor else render
    script, warnings = write(config, request, arguments.config, arguments.overrides)
    sys.stderr.writelines(f"{warning}\n" for warning in warnings)
    if arguments.out is not None:
        write_script(arguments.out, script)
    if arguments.submit:
        sys.stdout.write(submit(script))
    elif arguments.out is None:
        sys.stdout.write(script)
    return EXIT_OK
