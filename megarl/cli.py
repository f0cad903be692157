"""The command line: ``megarl check``, ``train``, ``launch``, ``eval``, ``doctor``, ``report``, ``samples``, ``export``
and ``track``.

Only what a command needs is imported, inside the command: ``check`` answers in well under a second because nothing here
imports torch.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
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

_NUM_SAMPLES = 2
_EXIT_BROKEN_PIPE = 141  # what a shell reports for a program that a closed pipe ended
_EXIT_INTERRUPTED = 130  # the same for Ctrl-C
_OVERRIDES_HELP = "settings that replace those of the file, for example actor.optimizer.lr=1e-6"


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit code. Mistakes of the user's are told without a traceback."""
    # A user's reward or algorithm is found in the working directory, whichever way megarl was started.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    # torch warns of hosts without a name, which do no harm; it reads this once, when it is loaded
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
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

    config = _load(arguments)
    sys.stdout.write(summarise(config))
    if config.generates and config.has_own_functions:
        sys.stdout.flush()
        from megarl.run.inputs import open_inputs, try_functions  # only now: it reads the data

        lines = try_functions(config, open_inputs(config, with_prompts=True, speak=False))
        sys.stdout.write("\nFunctions, tried in processes of their own\n" + "".join(f"  {line}\n" for line in lines))
    sys.stdout.write(f"\n{config.run.name}: the configuration is valid.\n")  # the last word: functions may have failed
    return EXIT_OK


def _train(arguments: argparse.Namespace) -> int:
    config = _load(arguments)

    from megarl.launch.start import start_training

    return start_training(config, fresh=arguments.fresh)


def _eval(arguments: argparse.Namespace) -> int:
    from megarl.config.load import load_config
    from megarl.config.preflight import require_inputs
    from megarl.run.candidate import find_candidate
    from megarl.run.evaluation_plan import config_to_evaluate

    candidate = find_candidate(arguments.model, arguments.step)
    config = load_config(arguments.config, [*arguments.overrides, *candidate.overrides])
    config = config_to_evaluate(config, arguments.set)
    require_inputs(config, trains=False)

    from megarl.launch.evaluate import start_evaluation

    return start_evaluation(config, candidate, arguments.out, _as_written(arguments))


def _as_written(arguments: argparse.Namespace) -> list[str]:
    """The words of ``megarl eval`` for its ranks."""
    named = {"--model": arguments.model, "--step": arguments.step, "--out": arguments.out}
    options = [word for name, value in named.items() if value is not None for word in (name, str(value))]
    chosen = [word for name in arguments.set for word in ("--set", name)]
    return ["eval", str(arguments.config), *arguments.overrides, *options, *chosen]


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


def _samples(arguments: argparse.Namespace) -> int:
    from megarl.report.sample_files import SHOWS, choose, read_step
    from megarl.report.sample_table import render

    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a letter shows its number
        sys.stdout.reconfigure(errors="backslashreplace")
    sampled = read_step(arguments.run, arguments.step)
    rows = [row for row in sampled.rows if row.contains(arguments.contains)]
    if not arguments.jsonl or arguments.show is not None or arguments.num is not None:
        rows = choose(rows, [arguments.show] if arguments.show else SHOWS, arguments.num or _NUM_SAMPLES)
    if arguments.jsonl:
        sys.stdout.writelines(row.to_json() + "\n" for row in rows)
    else:
        width = shutil.get_terminal_size((100, 24)).columns
        sys.stdout.writelines(line + "\n" for line in render(sampled, rows, width, full=arguments.full))
    if sampled.rows and not rows:
        sys.stderr.write("no sample of this step contains that text\n")
    if sampled.num_bad_lines:
        sys.stderr.write(f"{sampled.num_bad_lines} lines could not be read and were left out\n")
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


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


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
    evaluate = _add_with_config(commands, "eval", _eval, "evaluate a model on the configuration's evaluation sets")
    evaluate.add_argument(
        "--model",
        metavar="DIR",
        type=Path,
        help="a Hugging Face directory or a run; the configuration's model if not given",
    )
    evaluate.add_argument(
        "--step", type=_step, help="which checkpoint of a run: a number or best; the newest if not given"
    )
    evaluate.add_argument("--set", metavar="NAME", action="append", default=[], help="only this set; may be repeated")
    evaluate.add_argument("--out", metavar="FILE", type=Path, help="the results as JSON; beside the run if not given")
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
    samples = _add(commands, "samples", _samples, "show what the policy said in a step, and what it earned")
    samples.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")
    samples.add_argument("--step", type=int, help="which step; the newest one that was kept if not given")
    samples.add_argument("--show", choices=("worst", "best", "random"), help="only these; some of each if not given")
    samples.add_argument("--num", metavar="K", type=_positive, help=f"how many of each; {_NUM_SAMPLES} if not given")
    samples.add_argument("--contains", metavar="TEXT", default="", help="only where prompt or response has this text")
    samples.add_argument("--full", action="store_true", help="long texts to their end")
    samples.add_argument("--jsonl", action="store_true", help="everything about all samples, one per line of JSON")
    export = _add(commands, "export", _export, "write the model of a checkpoint as a Hugging Face directory")
    export.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")
    export.add_argument("--step", type=_step, help="which checkpoint: a number or best; the newest one if not given")
    export.add_argument("--out", metavar="DIR", type=Path, required=True, help="the directory to make")
    track = _add(commands, "track", _track, "give a finished or crashed run to its trackers, up to its last step")
    track.add_argument("run", metavar="RUN", type=Path, help="a run directory, for example runs/quickstart")
    track.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="for example track_with=swanlab")
    return parser


def _step(text: str) -> int | str:
    if text == "best":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor best") from None


def _add(commands: argparse._SubParsersAction[_Parser], name: str, command: Command, text: str) -> _Parser:
    parser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.set_defaults(run_command=command, parser=parser)
    return parser


def _add_with_config(commands: argparse._SubParsersAction[_Parser], name: str, command: Command, text: str) -> _Parser:
    parser = _add(commands, name, command, text)
    parser.add_argument("config", metavar="CONFIG", type=Path, help="a YAML file")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help=_OVERRIDES_HELP)
    return parser
