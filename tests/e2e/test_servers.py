"""Engines that are servers: the trainer cannot tell them from engines inside its ranks, not even while they die."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from megarl.config.load import load_config
from tests.e2e.runs import ROOT, SHORT, Outcome, command, environment, ledger, ranks_of, reproducible, train

pytestmark = pytest.mark.slow

# Rewards by chance: the policy moves in every step, which a task that is still too hard would not make it do.
COIN_FLIP = ROOT / "configs" / "quickstart_coin_flip.yaml"

SERVERS = ("generation.num_servers=2",)
AHEAD = ("generation.num_servers=1", "generation.colocated=false", "rollout.max_staleness=1")
# what only a run with servers reports, and how much was pushed: servers that come back get the weights again
_OF_SERVERS = re.compile(r'"((engine|mismatch/engine)/[^"]*|weights/push_bytes)": [^,}]*(, )?')


def samples_and_weights(outcome: Outcome) -> list[str]:
    """The reproducible ledger without what servers say of themselves."""
    return [_OF_SERVERS.sub("", line).replace(", }", "}") for line in reproducible(outcome)]


def totals(outcome: Outcome) -> dict[str, float]:
    names = ("engine/num_lost", "engine/num_restarts", "engine/num_rejected", "engine/num_aborted")
    return {name: sum(record["metrics"].get(name, 0) for record in ledger(outcome)) for name in names}


def servers_of(directory: Path) -> list[psutil.Process]:
    """Living servers of the run in ``directory``: children of its ranks."""
    return [
        child
        for rank in ranks_of(directory)
        for child in rank.children()
        if "megarl.generation.embedded.serve" in child.cmdline()
    ]


def disturbed(directory: Path, disturb: Callable[[], None], *overrides: str) -> Outcome:
    """A run during which ``disturb`` is called, in a thread of its own, as soon as the first step is over."""
    process = subprocess.Popen(
        command(COIN_FLIP, directory, *SHORT, *overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=environment(),
    )
    assert process.stdout is not None
    lines, thread = [], threading.Thread(target=disturb)
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step:1 ") and not thread.is_alive():
            thread.start()
    thread.join()
    code = process.wait(timeout=60)
    assert servers_of(directory) == []
    return Outcome(code, "".join(lines), "", directory / "quickstart_coin_flip")


@pytest.fixture(scope="module")
def inside(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = train(COIN_FLIP, tmp_path_factory.mktemp("inside"), *SHORT, "run.num_steps=4")
    assert outcome.code == 0, outcome.stderr
    return outcome


# (pushes by broadcast to real servers are in tests/unit/test_push_roads.py)
@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_servers_give_the_run_that_engines_inside_the_ranks_give(
    tmp_path: Path, inside: Outcome, transport: str
) -> None:
    """Every metric of every step but clocks and memory, to the last bit: samples, log-probs, gradients, evaluation."""
    outcome = train(COIN_FLIP, tmp_path, *SHORT, "run.num_steps=4", *SERVERS, f"weights.transport={transport}")
    assert outcome.code == 0, outcome.stderr
    assert samples_and_weights(outcome) == samples_and_weights(inside)
    assert ledger(outcome)[-1]["metrics"]["engine/num_healthy"] == 2
    for log in (outcome.directory / "logs").glob("engine_*.log"):
        assert "Traceback" not in log.read_text()


def keys_in(texts: Iterable[str]) -> list[str]:
    """A key is 43 characters of base64 (hashes are hexadecimal)."""
    outside = r"[A-Za-z0-9_/+-]"
    key = re.compile(
        rf"(?<!{outside})(?=[A-Za-z0-9_-]*[G-Zg-z_-])(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{{43}}(?!{outside})"
    )
    return [found for text in texts for found in key.findall(text)]


def test_servers_that_die_at_random_moments_change_no_sample_and_tell_no_key(tmp_path: Path, inside: Outcome) -> None:
    hit: list[int] = []
    seen: set[str] = set()

    def disturb() -> None:
        for delay in (0.35, 0.55):  # somewhere in a step: it generates, pushes or trains
            time.sleep(delay)
            servers = servers_of(tmp_path)
            for server in servers:
                seen.update(server.cmdline(), server.environ().values())
            for server in servers[:1]:
                if server.pid not in hit:
                    hit.append(server.pid)
                    os.kill(server.pid, signal.SIGKILL)

    outcome = disturbed(tmp_path, disturb, "run.num_steps=4", *SERVERS)
    assert outcome.code == 0, outcome.stdout[-2000:]
    assert hit and seen
    assert samples_and_weights(outcome) == samples_and_weights(inside)
    logs = [path.read_text(errors="replace") for path in (outcome.directory / "logs").iterdir()]
    assert keys_in([*logs, *seen]) == []


def test_without_servers_that_could_come_back_the_run_ends(tmp_path: Path) -> None:
    def disturb() -> None:
        for server in servers_of(tmp_path):
            server.kill()

    outcome = disturbed(tmp_path, disturb, "run.num_steps=50", *SERVERS, "generation.max_restarts=0")
    assert outcome.code == 69
    assert "MRL-5160" in outcome.stdout and "Traceback" not in outcome.stdout


def started(module: str) -> tuple[subprocess.Popen[str], str]:
    """A server of the quickstart's model, not the run's own; and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdin is not None and process.stdout is not None
    config = load_config(ROOT / "configs" / "quickstart.yaml", []).model.config
    settings = {"model_config": config, "num_slots": 8, "max_sequence_length": 128}
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    return process, f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"


def test_a_server_that_serves_other_weights_than_it_says_is_named_in_the_first_step(tmp_path: Path) -> None:
    servers = [started("megarl.generation.embedded.serve"), started("tests.nudged_server")]
    try:
        urls = f"generation.urls=[{','.join(url for _, url in servers)}]"
        overrides = (*SHORT, "run.num_steps=1", "eval.sets={}", "rollout.prompts_per_step=32", urls)
        outcome = train(COIN_FLIP, tmp_path, *overrides)
    finally:
        for process, _ in servers:
            process.kill()
            process.wait()
    assert outcome.code == 0, outcome.stderr
    alerts = ledger(outcome)[-1]["alerts"]
    named = servers[1][1].removeprefix("http://")
    assert [alert["rule"] for alert in alerts if f"{named} holds other weights" in alert["message"]] == ["H27"], alerts


def test_a_run_that_draws_ahead_is_the_same_after_a_kill(tmp_path: Path) -> None:
    overrides = (*SHORT, "run.num_steps=4", "checkpoint.every=1", "eval.sets={}", *AHEAD)
    whole = train(COIN_FLIP, tmp_path, *overrides, "run.name=whole")
    assert whole.code == 0, whole.stderr
    killed = train(COIN_FLIP, tmp_path, *overrides, "run.name=killed", fault="step/update:0:6=kill")
    assert killed.code != 0
    resumed = train(COIN_FLIP, tmp_path, *overrides, "run.name=killed")
    assert resumed.code == 0, resumed.stderr
    assert samples_and_weights(resumed) == samples_and_weights(whole)
    ages = [record["metrics"].get("sample/staleness/max") for record in ledger(whole)]
    assert ages == [None] * 4 + [0, 1, 1, 1]


def test_slow_groups_are_carried_over(tmp_path: Path) -> None:
    overrides = (
        *(*SHORT, "run.num_steps=4", "generation.num_servers=1", "generation.num_slots=8"),
        *("rollout.extra_prompts=2", "rollout.unfinished=carry_over", "rollout.max_staleness=1", "rollout.record=true"),
    )
    outcome = train(COIN_FLIP, tmp_path, *overrides)
    assert outcome.code == 0, outcome.stderr
    assert totals(outcome)["engine/num_aborted"] > 0
    seen: list[str] = []
    for path in sorted((outcome.directory / "rollouts").iterdir()):
        groups = [json.loads(line) for line in path.read_text().splitlines()]
        seen += [group["prompt"]["id"] for group in groups]
        assert len(groups) == 4
    assert len(set(seen)) == len(seen)
    assert all(record["metrics"].get("sample/staleness/max", 0) <= 1 for record in ledger(outcome))
