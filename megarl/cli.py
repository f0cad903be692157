"""The command line: ``megarl check``, ``train``, ``launch``, ``doctor``, ``report``, ``export`` and ``track``.

Only what a command needs is imported, inside the command: ``check`` answers in well under a second because nothing here
imports torch.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megarl import __version__
from megarl.core.errors import EXIT_INTERNAL, EXIT_OK, ConfigError, MegarlError
from megarl.launch.commands import add_launchers

if TYPE_CHECKING:
    from megarl.config.schema import RunConfig

Command = Callable[[argparse.Namespace], int]

_EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that a closed pipe ended
_EXIT_INTERRUPTED = 130  # the same for Ctrl-C
_OVERRIDES_HELP = "settings that replace those of the file, for example actor.optimizer.lr=1e-6"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit code. Mistakes of the user's are told without a traceback."""
    # A user's reward or algorithm is found in the working directory, whichever way megarl was started.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        _require_streams()
        code = _run(argv)
        _flush()  # here, so that a closed pipe is noticed while it can still be handled
        return code
    except MegarlError as error:
        if _speaks():
            sys.stderr.write(f"{error}\n")
        return error.exit_code
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except Exception:
        sys.stderr.write(f"MRL-9001 internal error in megarl {__version__}. Please report it with this text:\n")
        sys.stderr.write(traceback.format_exc())
        return EXIT_INTERNAL


def _speaks() -> bool:
    """Ranks of one node read the same files and variables, and find the same mistakes: the first of them tells."""
    from megarl.launch.rendezvous import identify

    try:
        record = identify(os.environ)
    except ConfigError:
        return True
    return record is None or record.local_rank == 0


def _require_streams() -> None:
    """Python has no stdout or stderr where the shell closed them (``>&-``); what is written then goes nowhere."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  (to the end of the process)


def _flush() -> None:
    """A full disk behind stdout is no reason to call a finished command a failure."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str] | None) -> int:
    parser = _parser()
    try:
        arguments, rest = parser.parse_known_args(argv)
    except SystemExit:  # --help and --version end this way; mistakes raise ConfigError
        return EXIT_OK
    # argparse takes all positional words at once: settings behind an option are left over
    strange = [word for word in rest if word.startswith("-") or not hasattr(arguments, "overrides")]
    if strange:
        # without their values: one might be a secret
        arguments.parser.error(f"unrecognized arguments: {' '.join(word.partition('=')[0] for word in strange)}")
    if rest:
        arguments.overrides += rest
    command: Command = arguments.run_command
    return command(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from megarl.config.summary import summarise

    sys.stdout.write(summarise(_load(arguments)))
    return EXIT_OK


def _train(arguments: argparse.Namespace) -> int:
    config = _load(arguments)

    from megarl.launch.start import start_training  # only now: it imports torch

    return start_training(config, fresh=arguments.fresh)


def _doctor(arguments: argparse.Namespace) -> int:
    from megarl.config.load import load_config
    from megarl.launch.doctor.examine import examine

    config = None if arguments.config is None else load_config(arguments.config, arguments.overrides)
    return examine(config, as_json=arguments.json)


def _report(arguments: argparse.Namespace) -> int:
    from megarl.report.write import write_report

    path = write_report(arguments.run, arguments.out, arguments.compare)
    sys.stdout.write(f"{path}\n")
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    from megarl.run.export import export_checkpoint

    sys.stdout.write(export_checkpoint(arguments.run, arguments.step, arguments.out))
    return EXIT_OK


def _track(arguments: argparse.Namespace) -> int:
    from megarl.run.track import track_run

    sys.stdout.write(track_run(arguments.run, arguments.overrides))
    return EXIT_OK


def _load(arguments: argparse.Namespace) -> RunConfig:
    from megarl.config.load import load_config
    from megarl.config.preflight import require_inputs
    from megarl.config.tracker_check import require_trackers
    from megarl.launch.rendezvous import identify

    config = load_config(arguments.config, arguments.overrides)
    require_inputs(config)
    record = identify(os.environ)
    if record is None or record.rank == 0:  # only the driver has trackers, and needs their packages and secrets
        require_trackers(config)
    return config


class _Parser(argparse.ArgumentParser):
    """Reports mistakes as `ConfigError` (exit code 64) instead of exiting with 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("MRL-1011", f"{message}\n    {self.format_usage().strip()}\n    Try: {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megarl", description="Reinforcement learning for language models on Megatron-Core.")
    parser.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_with_config(commands, "check", _check, "validate a configuration and show its layout, batches and phases")
    train = _add_with_config(
        commands, "train", _train, "train, as the configuration says; a run that was begun goes on"
    )
    train.add_argument("--fresh", action="store_true", help="start over; what is there moves to NAME.1")
    launch = commands.add_parser("launch", help="train on a cluster: launch ray CONFIG, launch slurm CONFIG")
    add_launchers(launch.add_subparsers(title="launchers", metavar="LAUNCHER", required=True), _add_with_config)
    doctor = _add(commands, "doctor", _doctor, "say whether this machine, or all ranks of a launcher, can train")
    doctor.add_argument("config", metavar="CONFIG", type=Path, nargs="?", help="a YAML file, and what it needs")
    doctor.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=_OVERRIDES_HELP)
    doctor.add_argument("--json", action="store_true", help="for programs")
    report = _add(commands, "report", _report, "write what a run did as one HTML page")
    report.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")
    report.add_argument(
        "--compare", metavar="OTHER", type=Path, help="another run directory, drawn into the same charts"
    )
    report.add_argument("--out", metavar="FILE", type=Path, help="the page; report.html in RUN if not given")
    export = _add(commands, "export", _export, "write the model of a checkpoint as a Hugging Face directory")
    export.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")
    export.add_argument("--step", type=int, help="which checkpoint; the newest one if not given")
    export.add_argument("--out", metavar="DIR", type=Path, required=True, help="the directory to make")
    track = _add(commands, "track", _track, "give a finished or crashed run to its trackers, up to its last step")
    track.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")
    track.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="for example track_with=swanlab")
    return parser


def _add(commands: argparse._SubParsersAction[_Parser], name: str, command: Command, text: str) -> _Parser:
    parser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.set_defaults(run_command=command, parser=parser)
    return parser


def _add_with_config(commands: argparse._SubParsersAction[_Parser], name: str, command: Command, text: str) -> _Parser:
    parser = _add(commands, name, command, text)
    parser.add_argument("config", metavar="CONFIG", type=Path, help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=_OVERRIDES_HELP)
    return parser
