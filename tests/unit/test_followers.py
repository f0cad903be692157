"""Trackers' processes: every point of the ledger exactly once, whatever is killed and whenever."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import struct
import textwrap
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from megarl.config.load import load_config
from megarl.config.resolved import dump_resolved
from megarl.core.errors import ConfigError
from megarl.trackers.followers import Followers, Patience
from megarl.trackers.sinks import in_order, spelling_for
from tests.tracker_files import (
    Points,
    dashboard_groups,
    dashboard_points,
    swanlab_points,
    tensorboard_points,
    tensorboard_texts,
    wandb_config,
    wandb_points,
)  # fmt: skip

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
DEVICES = [{"device": 0, "name": "cpu", "host": "here"}, {"device": 1, "name": "cpu", "host": "here"}]
# Everything happens quickly; what must never happen has all the time.
QUICK = Patience(to_be_ready=120.0, to_speak=120.0, to_leave=60.0, between_attempts=0.05)
TRACKERS = {
    "tensorboard": ("track_with=tensorboard",),
    "wandb": ("track_with=wandb", "tracker_kwargs.mode=offline"),
    "swanlab": ("track_with=swanlab", "tracker_kwargs.mode=offline"),
    "local": ("track_with=swanlab", "tracker_kwargs.mode=local"),
}


class Run:
    """A run directory with a ledger that a test writes."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        self.directory = directory
        directory.mkdir()
        self.config = load_config(QUICKSTART, overrides)
        (directory / "resolved.yaml").write_text(dump_resolved(self.config))
        (directory / "devices.json").write_text(json.dumps(DEVICES))
        (directory / "run_id").write_text("0123abcd")
        self.ledger = directory / "metrics.jsonl"
        self.random = random.Random(0)

    @property
    def tracker(self) -> str:
        return self.config.track_with[0]

    def record(self, step: int) -> None:
        metrics: dict[str, object] = {
            "training/global_step": step,
            "critic/score/mean": self.random.random(),
            "actor/pg_loss": -self.random.random() * 1e-7,
            "timing_s/gen": self.random.random() * 1e3,
            "memory/cpu/actor_train/train_step/end/rss": self.random.random(),
            "eval/held_out/score/mean@1": self.random.random(),
            "user/half_right": self.random.random(),
        }
        if step == 2:
            metrics["actor/kl_loss"] = "NaN"
            metrics["actor/grad_norm"] = "Infinity"
        line: dict[str, object] = {"step": step, "time": 1.7e9 + step + self.random.random(), "metrics": metrics}
        if step == 3:
            line["alerts"] = [{"rule": "H05", "severity": 2, "message": "the policy has collapsed"}]
        with self.ledger.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def rewind(self, last_step: int) -> None:
        lines = self.ledger.read_text().splitlines(keepends=True)
        self.ledger.write_text("".join(line for line in lines if json.loads(line)["step"] <= last_step))

    def follow(self, patience: Patience = QUICK) -> Followers:
        followers = Followers(self.directory, [self.tracker], patience)
        followers.await_ready()
        return followers

    def expected(self) -> Points:
        """Every point of the ledger, once, in this tracker's spelling."""
        spelling = spelling_for(self.config, self.tracker)
        points: Points = {}
        for line in self.ledger.read_text().splitlines():
            record = json.loads(line)
            metrics = {name: float(value) for name, value in record["metrics"].items()}
            points |= {(name, record["step"]): [value] for name, value in in_order(spelling.spell(metrics)).items()}
        return points

    def found(self) -> Points:
        trackers = self.directory / "trackers"
        if self.tracker == "tensorboard":
            return tensorboard_points(trackers / "tensorboard")
        if self.tracker == "wandb":
            (path,) = (trackers / "wandb").glob("offline-run-*/*.wandb")
            return wandb_points(path)
        (path,) = (trackers / "swanlab").glob("run-*/*.swanlab")
        if self.config.tracker_kwargs["mode"] == "local":
            assert same(dashboard_points(trackers / "swanlab"), swanlab_points(path))
        return swanlab_points(path)

    def processes(self) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if str(self.directory) in (process.info["cmdline"] or []) and self.tracker in process.info["cmdline"]
        ]


def same(one: Points, other: Points, *, single: bool = False) -> bool:
    """Equal point by point; ``single``: up to TensorBoard's 32 bits."""

    def as_stored(value: float) -> object:
        if math.isnan(value):
            return "NaN"
        return struct.unpack("f", struct.pack("f", value))[0] if single else value

    def stored(points: Points) -> dict:
        return {place: [as_stored(value) for value in values] for place, values in points.items()}

    assert stored(one) == stored(other)
    return True


def make(name: str, directory: Path) -> Run:
    return Run(directory / name, *TRACKERS[name])


def assert_delivered(run: Run, followers: Followers) -> None:
    followers.finish()
    assert followers.all_delivered, (run.directory / "logs" / f"tracker_{run.tracker}.log").read_text()
    assert run.processes() == []
    same(run.found(), run.expected(), single=run.tracker == "tensorboard")


@pytest.mark.parametrize("name", TRACKERS)
def test_every_point_once(name: str, tmp_path: Path) -> None:
    run = make(name, tmp_path)
    run.record(0)  # before anybody follows
    followers = run.follow()
    for step in range(1, 6):
        run.record(step)
        followers.log({}, step)
    assert_delivered(run, followers)


@pytest.mark.parametrize("name", TRACKERS)
def test_killed_at_any_moment_and_resumed_before(name: str, tmp_path: Path) -> None:
    """Processes are killed while they start or deliver, and the run goes back to a checkpoint twice."""
    run = make(name, tmp_path)
    moments = random.Random(name)
    step = 0
    for life in range(4):
        followers = Followers(run.directory, [run.tracker], QUICK)
        for _ in range(5):
            run.record(step)
            followers.log({}, step)
            step += 1
        if life < 3:
            # not a wait for something: any moment is as good as another
            time.sleep(moments.random() * 2)
            for process in run.processes():
                process.kill()
            followers._all[0].process.end()
        if life in (0, 2):
            step -= 3
            run.rewind(step - 1)
    assert_delivered(run, followers)


@pytest.mark.parametrize("name", TRACKERS)
def test_a_process_that_dies_is_started_again(name: str, tmp_path: Path) -> None:
    run = make(name, tmp_path)
    followers = run.follow()
    for step in range(6):
        run.record(step)
        if step == 3:
            (process,) = run.processes()
            process.kill()
            process.wait(10)
        followers.log({}, step)
    assert_delivered(run, followers)


def test_config_and_devices_and_alerts_reach_tensorboard(tmp_path: Path) -> None:
    run = make("tensorboard", tmp_path)
    for step in range(5):
        run.record(step)
    assert_delivered(run, run.follow())
    texts = tensorboard_texts(run.directory / "trackers" / "tensorboard")
    assert "prompts_per_step: 32" in texts["config"][0]
    assert texts["devices"] == ["| device | name | host |\n| --- | --- | --- |\n| 0 | cpu | here |\n| 1 | cpu | here |"]
    assert texts["alerts"] == ["- **H05** (severity 2) the policy has collapsed"]


def test_config_and_devices_reach_wandb_and_swanlab(tmp_path: Path) -> None:
    run = make("wandb", tmp_path)
    run.record(0)
    assert_delivered(run, run.follow())
    (path,) = (run.directory / "trackers" / "wandb").glob("offline-run-*/*.wandb")
    config = wandb_config(path)
    assert config["devices"] == DEVICES
    assert config["rollout"]["prompts_per_step"] == 32
    run = make("swanlab", tmp_path)
    run.record(3)
    assert_delivered(run, run.follow())
    (path,) = (run.directory / "trackers" / "swanlab").glob("run-*/files/config.yaml")
    assert "prompts_per_step: 32" in path.read_text()
    assert "name: cpu" in path.read_text()


def test_event_files_that_are_gone_are_written_again(tmp_path: Path) -> None:
    """The cursor is about files, not about a run: without them there is nothing to go on from."""
    run = make("tensorboard", tmp_path)
    for step in range(3):
        run.record(step)
    assert_delivered(run, run.follow())
    shutil.rmtree(run.directory / "trackers" / "tensorboard")
    assert_delivered(run, run.follow())


def test_a_dashboard_that_fails_once_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SwanLab swallows what its callbacks raise; the points must not be lost with it."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN_ONCE.format(marker=tmp_path / "broke"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = make("local", tmp_path)
    followers = run.follow()
    for step in range(4):
        run.record(step)
        followers.log({}, step)
    assert_delivered(run, followers)
    assert (tmp_path / "broke").exists()


BROKEN_ONCE = """
import json, os, sys

if "megarl.trackers.follow" in " ".join(sys.orig_argv):
    whole = json.dumps

    def dumps(value, *args, **kwargs):
        if isinstance(value, dict) and "create_time" in value and not os.path.exists("{marker}"):
            open("{marker}", "w").close()
            raise OSError("database is locked")
        return whole(value, *args, **kwargs)

    json.dumps = dumps
"""


def test_the_local_dashboard_groups_charts(tmp_path: Path) -> None:
    run = make("local", tmp_path)
    run.record(0)
    assert_delivered(run, run.follow())
    groups = dashboard_groups(run.directory / "trackers" / "swanlab")
    assert groups[:2] == ["critic", "actor"]
    assert groups[-1] == "memory"
    assert {"timing_s", "eval", "time"} <= set(groups)


def test_a_follower_whose_starter_is_killed_delivers_and_leaves(tmp_path: Path) -> None:
    """SIGKILL closes the pipe: what the ledger holds is delivered, and nobody stays behind."""
    run = make("tensorboard", tmp_path)
    child = os.fork()
    if child == 0:
        followers = run.follow()
        for step in range(4):
            run.record(step)
            followers.log({}, step)
        os.kill(os.getpid(), signal.SIGKILL)
    processes = []
    while not processes and os.waitpid(child, os.WNOHANG) == (0, 0):
        processes = run.processes()
    for process in processes:
        process.wait(30)
    assert run.processes() == []
    same(run.found(), run.expected(), single=True)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("track_with=wandb", "tracker_kwargs.mode=offline", "tracker_kwargs.settings={no_such_setting: 1}"), "Extra"),
        (("track_with=swanlab", "tracker_kwargs.mode=offline", "tracker_kwargs.project='a b/c?'"), "project"),
        (("track_with=tensorboard", "tracker_kwargs.log_dir=/proc/nowhere"), "/proc/nowhere"),
        (("track_with=wandb", "tracker_kwargs.api_key=env:MEGARL_TEST_NO_SUCH_VARIABLE"), "MEGARL_TEST_NO_SUCH"),
    ],
)
def test_what_a_service_refuses_is_an_error_at_the_start(overrides: tuple[str, ...], told: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", *overrides)
    with pytest.raises(ConfigError, match="MRL-1016") as caught:
        run.follow()
    assert told in str(caught.value)
    assert run.processes() == []


FAKE_WANDB = """
import json, os, time
from pathlib import Path
STATE = Path(os.environ["FAKE_WANDB"])
class Settings:
    base_url = os.environ["FAKE_WANDB_URL"]
    def __init__(self, **_): pass
def _trouble(place):
    '''The next item of the script that is for this place.'''
    script = json.loads((STATE / "script.json").read_text())
    for number, (where, what) in enumerate(script):
        if where == place:
            del script[number]
            (STATE / "script.new").write_text(json.dumps(script))
            os.replace(STATE / "script.new", STATE / "script.json")
            if what == "hang":
                time.sleep(1000)
            raise {"oserror": OSError("503 Service Unavailable"), "bug": KeyError("graphql")}[what]
class Run:
    resumed = True
    def __init__(self):
        rows = STATE / "rows.jsonl"
        self.starting_step = len(rows.read_text().splitlines()) if rows.exists() else 0
    def log(self, values, step):
        _trouble("log")
        with (STATE / "rows.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "values": values}) + "\\n")
    def alert(self, **_):
        _trouble("alert")
    def finish(self):
        _trouble("finish")
def init(**_):
    _trouble("init")
    return Run()
"""
FAKE_ERRORS = "class CommError(Exception): ...\nclass UsageError(Exception): ...\n"


class Answers(BaseHTTPRequestHandler):
    """A server that is there, whatever it is asked."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


def fake_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: list[tuple[str, str]]) -> Path:
    """A ``wandb`` whose calls go wrong as the script says, and which keeps what it was given."""
    package = tmp_path / "fake" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_WANDB))
    (package / "errors.py").write_text(FAKE_ERRORS)
    state = tmp_path / "service"
    state.mkdir()
    (state / "script.json").write_text(json.dumps(script))
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("FAKE_WANDB", str(state))
    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("FAKE_WANDB_URL", f"http://127.0.0.1:{server.server_port}")
    return state


def test_an_outage_costs_no_step_and_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service raises, hangs and returns errors for part of the run; the run never waits for it."""
    script = [("init", "oserror"), ("init", "oserror"), ("log", "oserror"), ("log", "hang"), ("init", "bug")]
    script += [("log", "bug"), ("alert", "oserror")]
    state = fake_service(tmp_path, monkeypatch, script)
    run = Run(tmp_path / "run", "track_with=wandb", "tracker_kwargs.mode=online")
    run.record(0)
    followers = run.follow(Patience(to_be_ready=60.0, to_speak=1.5, to_leave=60.0, between_attempts=0.01))
    step = 0
    while json.loads((state / "script.json").read_text()):  # until everything that can go wrong has
        step += 1
        assert step < 30_000
        run.record(step)
        followers.log({}, step)
        time.sleep(0.02)  # a step of training
    followers.finish()
    assert followers.all_delivered
    rows = [json.loads(line) for line in (state / "rows.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(step + 1))
    points = {(k, r["step"]): [float(v)] for r in rows for k, v in r["values"].items() if not k.startswith("_")}
    same(points, run.expected())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)), "one warning per cause"
    assert any("503 Service Unavailable" in text for text in told)
    assert any("said nothing" in text for text in told)


def test_a_service_that_hangs_at_the_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_service(tmp_path, monkeypatch, [("finish", "hang")])
    run = Run(tmp_path / "run", "track_with=wandb", "tracker_kwargs.mode=online")
    followers = run.follow(Patience(to_leave=0.5))
    run.record(0)
    followers.log({}, 0)
    followers.finish()
    assert not followers.all_delivered
    assert run.processes() == []
    assert f"megarl track {run.directory}" in caplog.text
