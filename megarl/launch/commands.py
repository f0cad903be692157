"""``megarl launch WAY CONFIG``: start a run with a scheduler. What a way needs is imported when it is taken."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from megarl.core.errors import EXIT_OK

Command = Callable[[argparse.Namespace], int]
# Of whatever parser class the command line has: mistakes are reported in its way.
Commands: TypeAlias = "argparse._SubParsersAction[Any]"


def add_launch(commands: Commands) -> None:
    """Add ``launch`` and its ways to the command line."""
    text = "start a run with a scheduler"
    launch = commands.add_parser("launch", help=text, description=text.capitalize() + ".")
    ways = launch.add_subparsers(title="ways", metavar="WAY", required=True)
    slurm = _add_way(ways, "slurm", _slurm, "write the sbatch file of a run, and submit it if asked to")
    slurm.add_argument("--nodes", metavar="N", type=int, required=True, help="machines")
    slurm.add_argument("--ranks-per-node", metavar="N", type=int, help="run.num_ranks / nodes if not given")
    slurm.add_argument("--time", metavar="LIMIT", default="24:00:00", help="Slurm's time limit; 24:00:00 if not given")
    slurm.add_argument(
        "--save-before", metavar="SECONDS", type=int, default=300, help="save and requeue so long before"
    )
    slurm.add_argument("--partition", metavar="NAME", help="Slurm's partition")
    slurm.add_argument("--out", metavar="FILE", type=Path, help="the file to write; to the terminal if not given")
    slurm.add_argument("--submit", action="store_true", help="hand it to sbatch")


def _slurm(arguments: argparse.Namespace) -> int:
    from megarl.config.load import load_config
    from megarl.config.preflight import require_inputs
    from megarl.launch.slurm import SlurmRequest, render, submit, write_script

    config = load_config(arguments.config, arguments.overrides)
    require_inputs(config)
    request = SlurmRequest(
        arguments.nodes, arguments.ranks_per_node, arguments.time, arguments.save_before, arguments.partition
    )
    script, warnings = render(config, request, arguments.config, arguments.overrides)
    sys.stderr.writelines(f"{warning}\n" for warning in warnings)
    if arguments.out is not None:
        write_script(arguments.out, script)
    if arguments.submit:
        sys.stdout.write(submit(script))
    elif arguments.out is None:
        sys.stdout.write(script)
    return EXIT_OK


def _add_way(ways: Commands, name: str, command: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = ways.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.set_defaults(run_command=command, parser=parser)
    parser.add_argument("config", metavar="CONFIG", type=Path, help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="settings that replace those of the file")
    return parser
