"""Real runs with trackers: killed and resumed, read back point by point, and searched for secrets."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import psutil
import pytest

from megarl.cli import main
from megarl.config.load import load_config
from megarl.trackers.sinks import spelling_for
from tests.e2e.runs import QUICKSTART, SHORT, Outcome, command, environment, ledger, train
from tests.tracker_files import (
    Points,
    dashboard_points,
    swanlab_points,
    tensorboard_points,
    wandb_config,
    wandb_points,
)  # fmt: skip
from tests.unit.test_followers import same

pytestmark = pytest.mark.slow

TRACKED = (
    "track_with=[stdout,tensorboard,wandb,swanlab]",
    "tracker_kwargs={wandb: {mode: offline}, swanlab: {mode: offline}}",
    "checkpoint.every=2",
)


def expected(outcome: Outcome, sink: str) -> Points:
    spelling = spelling_for(load_config(outcome.directory / "resolved.yaml"), sink)
    points: Points = {}
    for record in ledger(outcome):
        metrics = {name: float(value) for name, value in record["metrics"].items()}
        points |= {(name, record["step"]): [float(v)] for name, v in spelling.spell(metrics).items()}
    return points


def assert_all_points(outcome: Outcome) -> None:
    trackers = outcome.directory / "trackers"
    same(tensorboard_points(trackers / "tensorboard"), expected(outcome, "tensorboard"), single=True)
    (path,) = (trackers / "wandb").glob("offline-run-*/*.wandb")
    same(wandb_points(path), expected(outcome, "wandb"))
    assert wandb_config(path)["rollout"]["group_size"] == 4
    (path,) = (trackers / "swanlab").glob("run-*/*.swanlab")
    same(swanlab_points(path), expected(outcome, "swanlab"))


def test_a_run_that_is_killed_and_resumed_is_whole_in_every_tracker(tmp_path: Path) -> None:
    """Step 4 is recorded, and perhaps delivered, before the kill; it is made again after step 2's checkpoint."""
    killed = train(QUICKSTART, tmp_path, *SHORT, *TRACKED, fault="step/end:0:4=kill")
    assert killed.code == 70, killed.stderr
    whole = train(QUICKSTART, tmp_path, *SHORT, *TRACKED)
    assert whole.code == 0, whole.stderr
    assert "Resuming at step" in whole.stdout
    assert "Tracker" not in whole.stderr
    assert [record["step"] for record in ledger(whole)] == [0, 1, 2, 3, 4, 5]
    assert_all_points(whole)
    # An old run can be given to another tracker later.
    overrides = ["track_with=swanlab", f"tracker_kwargs.swanlab={{mode: local, logdir: {tmp_path}/board}}"]
    assert main(["track", str(whole.directory), *overrides]) == 0
    same(dashboard_points(tmp_path / "board"), expected(whole, "swanlab"))


def test_a_tracker_that_refuses_the_run_stops_it_before_the_first_step(tmp_path: Path) -> None:
    outcome = train(QUICKSTART, tmp_path, *SHORT, "track_with=tensorboard", "tracker_kwargs.log_dir=/proc/nowhere")
    assert outcome.code == 64
    assert outcome.stderr.startswith("MRL-1016 track_with: tensorboard does not work")
    assert outcome.steps == []


def test_track_needs_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megarl.run.directory import claim

    assert main(["track", str(tmp_path)]) == 66
    config = load_config(QUICKSTART, [f"run.dir={tmp_path}", "track_with=tensorboard"])
    directory = claim(config, fresh=False)
    directory.begin(config)
    assert main(["track", str(directory.path)]) == 73
    assert main(["track", str(directory.path), "track_with=stdout"]) == 64
    directory.release()
    assert capsys.readouterr().err.count("MRL-") == 3


CANARIES = {name: f"canary{number:02d}{'f' * 32}" for number, name in enumerate(
    ("wandb_env", "swanlab_env", "other_env", "key_file", "git_remote", "https_proxy", "http_proxy", "reward_env",
     "literal_yaml", "url", "command_line", "netrc"), start=1
)}  # fmt: skip
REWARD = """
import os
def score(prompt, sample, after, api_key):
    assert api_key == "env:JUDGE_KEY" and "JUDGE_KEY" not in os.environ  # workers have no secrets
    return 0.5
"""


def plant(directory: Path) -> dict[str, str]:
    """Nine secrets where real ones are; the environment of the run."""
    (directory / "judge.py").write_text(REWARD)
    (directory / "key").write_text(CANARIES["key_file"])
    home = directory / "home"
    home.mkdir()
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {CANARIES['netrc']}\n")
    (home / ".netrc").chmod(0o600)
    remote = f"https://bot:{CANARIES['git_remote']}@example.org/x.git"
    for words in (["init", "-q"], ["remote", "add", "origin", remote]):
        subprocess.run(["git", *words], cwd=directory, check=True)
    return environment(
        HOME=str(home),
        WANDB_API_KEY=CANARIES["wandb_env"],
        SWANLAB_API_KEY=CANARIES["swanlab_env"],
        MY_PASSWORD=CANARIES["other_env"],
        JUDGE_KEY=CANARIES["reward_env"],
        HTTPS_PROXY=f"http://me:{CANARIES['https_proxy']}@127.0.0.1:9",
        HTTP_PROXY=f"http://me:{CANARIES['http_proxy']}@127.0.0.1:9",
    )


class CommandLines:
    """Those of all processes that were seen while a command ran."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> CommandLines:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            for process in psutil.process_iter(["cmdline"]):
                self.seen.add(" ".join(process.info["cmdline"] or []))


def test_twelve_planted_secrets_are_found_nowhere(tmp_path: Path) -> None:
    variables = plant(tmp_path)
    settings = (
        *SHORT,
        TRACKED[0],
        "tracker_kwargs.wandb={mode: offline, api_key: env:WANDB_API_KEY, settings: {x_extra_http_headers: "
        "{Authorization: env:MY_PASSWORD}}}",
        "tracker_kwargs.swanlab={mode: local, login_kwargs: {api_key: file:key}}",
        "checkpoint.every=1",
        "reward={name: 'judge:score', options: {api_key: env:JUDGE_KEY}}",
    )
    url = f"reward.options.url=https://me:{CANARIES['url']}@example.org"
    key = f"tracker_kwargs.wandb.api_key={CANARIES['command_line']}"
    yaml = tmp_path / "refused.yaml"
    yaml.write_text(f"extends: {QUICKSTART}\ntracker_kwargs: {{api_key: {CANARIES['literal_yaml']}}}\n")
    output = ""
    with CommandLines() as command_lines:
        for fault in ("step/update:0:4=raise", None):
            env = variables | ({"MEGARL_FAULT": fault} if fault else {})
            run = subprocess.run(
                command(QUICKSTART, tmp_path, *settings), cwd=tmp_path, env=env, capture_output=True, text=True
            )
            assert run.returncode == (70 if fault else 0), run.stderr
            output += run.stdout + run.stderr
    for config, words in ((yaml, ()), (QUICKSTART, (url,)), (QUICKSTART, (key,))):
        run = subprocess.run(
            command(config, tmp_path, *words), cwd=tmp_path, env=variables, capture_output=True, text=True
        )
        assert run.returncode == 64
        assert "MRL-1013" in run.stderr
        output += run.stdout + run.stderr
    assert any("megarl.trackers.follow" in line for line in command_lines.seen)
    assert any("wandb-core" in line for line in command_lines.seen)
    for name, canary in CANARIES.items():
        assert canary not in output, name
        assert not any(canary in line for line in command_lines.seen), name
    places = [tmp_path / "quickstart", tmp_path / "home"]
    num_files = 0
    for place in places:
        for path in place.rglob("*"):
            if path.is_file() and path.name != ".netrc":
                num_files += 1
                content = path.read_bytes()
                for name, canary in CANARIES.items():
                    assert canary.encode() not in content, (name, path)
    assert num_files > 50
    resolved = (tmp_path / "quickstart" / "resolved.yaml").read_text()
    assert "env:JUDGE_KEY" in resolved
    assert "file:key" in resolved
