"""``megarl launch LAUNCHER CONFIG``: what the command line says about each launcher."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, Protocol

from megarl.core.errors import ConfigError

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


def _launch_on_ray(arguments: argparse.Namespace) -> int:
    from megarl.config.load import load_config
    from megarl.config.preflight import require_inputs
    from megarl.launch.ray_plan import require_shared_directory

    if arguments.nodes is not None and arguments.nodes < 1:
        arguments.parser.error(f"--nodes must be 1 or more, not {arguments.nodes}")
    config = load_config(arguments.config, arguments.overrides)
    require_shared_directory(config)
    require_inputs(config)
    try:
        from megarl.launch.on_ray import train_on_ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "MRL-1670",
            "megarl launch ray needs the package ray, which is not installed here.\n"
            'Install it on all nodes: pip install --constraint constraints.txt "megarl[ray]"',
        ) from None
    words = ["train", str(arguments.config), *arguments.overrides]
    return train_on_ray(config, words, asked_nodes=arguments.nodes, fresh=arguments.fresh)
