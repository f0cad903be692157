"""Kill and stop every kind of process under every launcher, and run the same command again.

    python tools/kill_launchers.py                       # everything that this machine can start: twenty minutes
    python tools/kill_launchers.py --only local,torchrun --victims rank0,launcher --signals STOP

For each launcher, victim and signal: a run of a few steps is disturbed after its second step. It must be said who it
was, on which host and in which phase; nothing may be left, in time; the exit code must be the documented one; and the
same command must end in the ledger of a run that nobody disturbed. Two cases do not end: a stopped launcher does no
harm (the ranks train on, and it ends as ever once it is continued), and an engine is replaced while the run goes on.
Prints one line of a Markdown table per case. Slurm and Ray need root; what cannot be started is told and left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.e2e import test_ray  # noqa: E402
from tests.e2e.ray_cluster import RayCluster, ray_cluster  # noqa: E402
from tests.e2e.runs import QUICKSTART, Outcome, environment, train  # noqa: E402
from tests.e2e.test_servers import SERVERS, samples_and_weights, totals  # noqa: E402
from tests.e2e.test_torchrun import HANG_SECONDS, PATIENCE, TORCHRUN  # noqa: E402
from tests.e2e.test_torchrun import SETTINGS as SHORT  # noqa: E402
from tests.launch.slurm_cluster import slurm_cluster  # noqa: E402
from tests.launch.test_slurm import Submitted, submitted  # noqa: E402

# Enough that nobody is too late to disturb it, however fast the machine is.
NUM_STEPS = 30
SETTINGS = (*SHORT, f"run.num_steps={NUM_STEPS}")
# "batch" is the shell of a Slurm job, "actor" the process of Ray that holds a rank
VICTIMS = ("rank0", "rank1", "launcher", "batch", "actor", "engine")
ONLY_UNDER = {"batch": "slurm", "actor": "ray"}
SIGNALS = {"KILL": signal.SIGKILL, "STOP": signal.SIGSTOP}
# what the watchdog promises
LIMIT_SECONDS = {"KILL": 15.0, "STOP": HANG_SECONDS + 10.0}
# By launcher: when a rank is killed, when it is stopped, when the launcher itself is killed (docs/debugging.md).
# That of a batch job is its step's: the highest of its tasks'.
EXIT_CODES = {"local": (70, 69, -9), "torchrun": (1, 1, -9), "slurm": (137, 69, 137), "ray": (1, 1, 1)}
# What is told when the launcher itself is killed: by a guard, by the shell of a batch job, or by Ray.
TOLD = {
    "torchrun": "MRL-9004 the launcher's process on .* was killed",
    "slurm": r"Killed\s+srun|MRL-8001 stopped by SIGTERM",
    "ray": "MRL-9004|Job '.*' failed",
}
# torchrun's logs, and empty directories that the package wandb makes when it is imported
OF_OTHERS = re.compile("^torchelastic_|wandb-(media|artifacts)$")
# An engine that does not answer is given up after half a minute, which must not look like a hang of the ranks.
ENGINES = (*SERVERS, "launch.hang_timeout_seconds=150")
SERVER = "megarl.generation.embedded.serve"


@dataclass
class Job:
    """A run that was launched; everything that belongs to it, also what it starts later, is known by its tree."""

    directory: Path
    # what started it, which others are descendants of; whether one of them belongs to the run, with all of its own
    root: psutil.Process
    belongs: Callable[[psutil.Process], bool]
    is_launcher: Callable[[psutil.Process, list[str]], bool]
    # how it ended, and what it said; None: it has not
    end: Callable[[], tuple[int, str] | None]
    seen: set[psutil.Process] = field(default_factory=set)

    @property
    def num_steps(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.is_file() else 0

    def tree(self) -> list[psutil.Process]:
        """Those that live, orphans as well."""
        with suppress(psutil.Error):
            self.seen.update(filter(self.belongs, self.root.children(recursive=True)))
        for process in list(self.seen):
            with suppress(psutil.Error):
                self.seen.update(process.children(recursive=True))
        return [process for process in self.seen if is_alive(process)]

    def ports(self) -> set[str]:
        """Where its processes listen."""
        found = set()
        for process in self.tree():
            with suppress(psutil.Error):
                connections = process.net_connections("tcp")
                found |= {f"port {one.laddr.port}" for one in connections if one.status == psutil.CONN_LISTEN}
        return found

    def find(self, victim: str) -> psutil.Process:
        for process in [self.root, *self.tree()]:
            with suppress(psutil.Error, OSError):
                line, variables = process.cmdline(), process.environ()
                number = variables.get("RANK", variables.get("SLURM_PROCID"))
                is_train = "-m megarl train" in " ".join(line) and "torch.distributed.run" not in line
                is_rank = is_train and number is not None and process.name() != "srun"
                if (
                    (victim == f"rank{number}" and is_rank)
                    or (victim == "launcher" and self.is_launcher(process, line) and not is_rank)
                    or (victim == "batch" and process.name() == "slurm_script")
                    or (victim == "actor" and line[0].startswith("ray::_Host"))
                    or (victim == "engine" and SERVER in line)
                ):
                    return process
        raise LookupError(f"no {victim} among {self.tree()}")

    def wait_for_step(self, step: int) -> None:
        begin = asked = time.monotonic()
        while self.num_steps < step:
            assert time.monotonic() < begin + PATIENCE, "the step did not come"
            if time.monotonic() > asked + 1.0:  # asking Slurm is work
                asked = time.monotonic()
                assert (ended := self.end()) is None, ended
            self.tree()
            time.sleep(0.02)

    def wait_for_end(self, but: Sequence[psutil.Process] = (), seconds: float = PATIENCE) -> list[psutil.Process]:
        """Until all but these have ended; returns who has not, after so many seconds."""
        deadline = time.monotonic() + seconds
        while (left := [p for p in self.tree() if p not in but]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def result(self) -> tuple[int, str]:
        deadline = time.monotonic() + PATIENCE
        while (result := self.end()) is None:
            assert time.monotonic() < deadline, "the command does not end"
            self.tree()
            time.sleep(0.1)
        return result


# Starts the run in a directory with further settings.
Start = Callable[[Path, Sequence[str]], AbstractContextManager[Job]]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def by_command(words: Sequence[str]) -> Start:
    """megarl's own launcher, or torchrun."""

    @contextmanager
    def start(directory: Path, settings: Sequence[str]) -> Iterator[Job]:
        command = [*words, "-m", "megarl", "train", str(QUICKSTART), f"run.dir={directory}", *SETTINGS, *settings]
        # not a pipe: nobody reads it while the run goes on
        output = directory / f"said_{len(list(directory.glob('said_*')))}.txt"
        with open(output, "w", encoding="utf-8") as file:
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=directory, env=environment(OMP_NUM_THREADS="1")
            )

        def end() -> tuple[int, str] | None:
            return None if process.poll() is None else (process.returncode, output.read_text(encoding="utf-8"))

        root = psutil.Process(process.pid)
        job = Job(directory / "quickstart", root, lambda _: True, lambda _, line: line == command, end, {root})
        try:
            yield job
        finally:
            end_all(job)
            process.wait()

    return start


def end_all(job: Job) -> None:
    for process in job.tree():
        with suppress(psutil.Error):
            process.kill()


@contextmanager
def on_slurm() -> Iterator[tuple[Start, int]]:
    """Starts by ``megarl launch slurm``, and a process in the cluster's network."""
    with tempfile.TemporaryDirectory(prefix="megarl-slurm-", dir="/tmp") as root, slurm_cluster(Path(root)) as slurm:
        first = psutil.Process(slurm.first_process)

        @contextmanager
        def start(directory: Path, settings: Sequence[str]) -> Iterator[Job]:
            slurm.wait_for_nodes()
            given: Submitted = submitted(slurm, directory, *SETTINGS, *settings)

            def end() -> tuple[int, str] | None:
                found = slurm.job(given.number)
                if found.state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                    return None
                code, _, number = found.exit_code.partition(":")
                return int(code) or (128 + int(number) if int(number) else 0), given.log

            job = Job(
                given.directory / "quickstart",
                first,
                lambda process: environment_of(process).get("SLURM_JOB_ID") == str(given.number),
                lambda process, _: process.name() == "srun" and process.parent().name() == "slurm_script",
                end,
            )
            try:
                yield job
            finally:
                slurm.run("scancel", "--signal=KILL", "--full", str(given.number), check=False)
                end_all(job)

        yield start, slurm.first_process


@contextmanager
def on_ray() -> Iterator[tuple[Start, int]]:
    """Starts by ``ray job submit``, and a process in the cluster's network."""
    numbers = itertools.count()
    # what is not read while the run goes on would hold it up
    with ThreadPoolExecutor() as readers, ray_cluster() as cluster:

        @contextmanager
        def start(directory: Path, settings: Sequence[str]) -> Iterator[Job]:
            project = directory / "project"
            project.mkdir(exist_ok=True)
            shutil.copy(QUICKSTART, project / "config.yaml")
            words = test_ray.submit(f"job-{next(numbers)}", project, *SETTINGS, "launch.max_restarts=0", *settings)
            process = cluster.start(project, *words)

            output = readers.submit(process.stdout.read if process.stdout else str)

            def end() -> tuple[int, str] | None:
                return None if process.poll() is None else (process.returncode, output.result())

            job = Job(directory / "runs" / "quickstart", cluster.process, belongs_to_ray_job, is_ray_driver, end)
            try:
                yield job
            finally:
                process.kill()
                end_all(job)

        yield start, network_of(cluster)


def environment_of(process: psutil.Process) -> dict[str, str]:
    with suppress(psutil.Error, OSError):
        return process.environ()
    return {}


def network_of(cluster: RayCluster) -> int:
    return cluster.process.pid


def belongs_to_ray_job(process: psutil.Process) -> bool:
    """The driver and the actors; ranks are children of theirs. Ray's own processes come and go as they like."""
    with suppress(psutil.Error):
        words = process.cmdline()
        return words[:1] == ["ray::_Host"] or is_ray_driver(process, words)
    return False


def is_ray_driver(_: psutil.Process, line: list[str]) -> bool:
    return {"launch", "ray"} <= set(line) and "submit" not in line


def traces(network: int | str) -> set[str]:
    """Everything that a run could leave, but for processes: open ports, shared memory, temporary files."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    found |= {f"TMPDIR/{name}" for name in os.listdir(os.environ["TMPDIR"]) if not OF_OTHERS.search(name)}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/{network}/net/{table}").read_text().splitlines()[1:]:
            _, address, _, state = row.split()[:4]
            if state == "0A":  # it listens
                found.add(f"port {int(address.rpartition(':')[2], 16)}")
    return found


def remaining(network: int | str, before: set[str], ports: set[str]) -> list[str]:
    """What is there that was not before. The kernel closes sockets a moment after the process is seen to have ended."""
    deadline = time.monotonic() + 2.0
    while True:
        # ports that others on this machine opened meanwhile are not the run's
        found = {name for name in traces(network) - before if not name.startswith("port ") or name in ports}
        if not found or time.monotonic() > deadline:
            return sorted(found)
        time.sleep(0.05)


@dataclass(frozen=True)
class Case:
    launcher: str
    victim: str
    signal: str

    @property
    def goes_on(self) -> bool:
        """Whether the run must reach its end all the same."""
        return self.victim == "engine" or (not self.victim.startswith("rank") and self.signal == "STOP")

    @property
    def exit_code(self) -> int:
        if self.goes_on:
            return 0
        of_rank_killed, of_rank_stopped, of_launcher = EXIT_CODES[self.launcher]
        if not self.victim.startswith("rank"):
            return of_launcher
        return of_rank_killed if self.signal == "KILL" else of_rank_stopped

    def is_named(self, output: str) -> bool | None:
        """A rank with host and phase, an engine with its address; None: there is nobody who could name it."""
        if not self.victim.startswith(("rank", "engine")):
            return (
                None if self.goes_on or self.launcher == "local" else re.search(TOLD[self.launcher], output) is not None
            )
        if self.victim == "engine":
            return re.search(r"generation server http://\S+: \w+ -> dead: .*; it is started again", output) is not None
        said = rf"MRL-(9002|5301) rank {self.victim[-1]} .*on {re.escape(socket.gethostname())} .*it was in \S+ of step"
        return re.search(said, output) is not None


@dataclass(frozen=True)
class Finding:
    """What became of a case."""

    case: Case
    is_named: bool | None
    seconds: float
    exit_code: int
    left: list[str]
    is_equal: bool
    was_resumed: bool

    @property
    def is_good(self) -> bool:
        in_time = self.case.goes_on or self.seconds <= LIMIT_SECONDS[self.case.signal]
        as_documented = self.exit_code == self.case.exit_code
        return in_time and as_documented and self.is_named is not False and not self.left and self.is_equal

    def row(self) -> str:
        named = {True: "yes", False: "NO", None: "-"}[self.is_named]
        equal = ("yes" if self.is_equal else "NO") + ("" if self.was_resumed else " (went on)")
        cells = (*vars(self.case).values(), named, f"{self.seconds:.1f}", str(self.exit_code))
        left = ", ".join(self.left) or "nothing"
        return "| " + " | ".join((*cells, left, equal, "ok" if self.is_good else "FAILED")) + " |"


def try_case(case: Case, start: Start, network: int | str, directory: Path, expected: list[str]) -> Finding:
    settings = ENGINES if case.victim == "engine" else ()
    before = traces(network)
    with start(directory, settings) as job:
        job.wait_for_step(2)
        victim, ports = job.find(case.victim), job.ports()
        begin = time.monotonic()
        victim.send_signal(SIGNALS[case.signal])
        if case.goes_on and case.victim != "engine" and case.signal == "STOP":
            # the ranks end by themselves; what waits for the launcher ends with it
            while job.num_steps < NUM_STEPS and time.monotonic() < begin + PATIENCE:
                time.sleep(0.05)
            victim.send_signal(signal.SIGCONT)
        patience = PATIENCE if case.goes_on else LIMIT_SECONDS[case.signal]
        alive = job.wait_for_end(seconds=patience)
        seconds = time.monotonic() - begin
        left = [f"{process.name()} {process.pid}" for process in alive]
        if alive:
            (directory / "left.txt").write_text("\n".join(describe(process) for process in alive))
            end_all(job)
        code, output = job.result()
        (directory / "output.txt").write_text(output)
    left += remaining(network, before, ports)
    outcome = Outcome(code, output, "", job.directory)
    was_resumed = code != 0 or len(samples_and_weights(outcome)) < NUM_STEPS
    if was_resumed:
        with start(directory, settings) as again:
            resumed, said = again.result()
        (directory / "resumed.txt").write_text(f"{said}\nexit code {resumed}\n")
    is_equal = samples_and_weights(outcome) == expected and (not was_resumed or resumed == 0)
    if case.victim == "engine":  # else nobody noticed, and nothing was shown
        is_equal = is_equal and (was_resumed or totals(outcome)["engine/num_restarts"] > 0)
    return Finding(case, case.is_named(output), seconds, code, left, is_equal, was_resumed)


def describe(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {process.status()} {process.cmdline()}"
    return f"{process.pid} is gone"


@contextmanager
def launcher(name: str) -> Iterator[tuple[Start, int | str]]:
    if name == "local":
        yield by_command([sys.executable]), "self"
    elif name == "torchrun":
        yield by_command([*TORCHRUN, "--standalone", "--nproc-per-node=2", "--max-restarts=0"]), "self"
    else:
        with on_slurm() if name == "slurm" else on_ray() as found:
            yield found


def chosen(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(allowed)}")
        return [name for name in allowed if name in text.split(",")]

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=chosen(tuple(EXIT_CODES)), default=list(EXIT_CODES), help="launchers")
    parser.add_argument("--victims", type=chosen(VICTIMS), default=list(VICTIMS))
    parser.add_argument("--signals", type=chosen(tuple(SIGNALS)), default=list(SIGNALS))
    parser.add_argument("--keep", type=Path, help="an empty directory for the runs, which then are not removed")
    arguments = parser.parse_args()
    is_good = True
    with ExitStack() as stack:
        root = arguments.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kill-")))
        (root / "tmp").mkdir(parents=True)
        (root / "whole").mkdir()
        os.environ["TMPDIR"] = str(root / "tmp")
        os.environ["OMP_NUM_THREADS"] = "1"
        whole = train(QUICKSTART, root / "whole", *SETTINGS)
        assert whole.code == 0, whole.stderr
        expected = samples_and_weights(whole)
        assert len(expected) == NUM_STEPS
        print("| launcher | victim | signal | named | seconds | exit code | left over | ledger equal | |", flush=True)
        print("|---|---|---|---|---|---|---|---|---|", flush=True)
        for name in arguments.only:
            try:
                with launcher(name) as (start, network):
                    for victim, number in itertools.product(arguments.victims, arguments.signals):
                        if ONLY_UNDER.get(victim, name) != name:
                            continue
                        case, directory = Case(name, victim, number), root / f"{name}-{victim}-{number}"
                        directory.mkdir()
                        try:
                            finding = try_case(case, start, network, directory, expected)
                        except (AssertionError, LookupError) as error:
                            print(f"| {name} | {victim} | {number} | FAILED: {error!s:.300} |", flush=True)
                            is_good = False
                            continue
                        print(finding.row(), flush=True)
                        is_good = is_good and finding.is_good
            except pytest.skip.Exception as reason:
                print(f"{name} is left out: {reason}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
