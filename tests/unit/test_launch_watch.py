"""A rank that dies, hangs or fails is named, all others end with it, and nobody is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.launch.watch import GRACE_SECONDS, RankState, Watch
from tests.e2e.runs import ROOT

# Long enough for guards of a busy machine to say that they are there.
PATIENCE = 60.0


def states(num: int, progress: float = 0.0) -> dict[int, RankState]:
    return {rank: RankState(rank, f"node-{rank}", progress, progress) for rank in range(num)}


# -- the judgement


def test_nothing_is_wrong() -> None:
    watch = Watch(states(2), 10.0)
    assert watch.judge(9.0) is None
    assert Watch(states(2), None).judge(1e9) is None
    assert watch.judge(99.0) is None  # before the first step it may take longer
    assert watch.judge(101.0) is not None


def test_who_waits_for_others_is_not_to_blame() -> None:
    """Rank 1 waits in a collective while the driver generates; only when nobody gets on the run hangs."""
    watch = Watch(states(3), 10.0)
    for rank in watch.ranks.values():
        rank.take({"step": 3, "at": 0.0})
    watch.ranks[0].take({"phase": "actor_infer/generate", "at": 1.0})
    watch.ranks[0].take({"at": 95.0})
    assert watch.judge(100.0) is None
    verdict = watch.judge(106.0)
    assert verdict is not None and verdict.is_hang and verdict.exit_code == 69
    # ranks 1 and 2 are behind: they have not even begun what rank 0 does
    assert verdict.message.startswith("MRL-5301 rank 1 on node-1 does not get on; no rank made progress for 10 s")


def test_the_slowest_is_named_with_its_place() -> None:
    watch = Watch(states(2), 10.0)
    for rank, at in ((0, 5.0), (1, 3.0)):
        watch.ranks[rank].take({"phase": "actor_train/train_step", "step": 212, "at": at})
    verdict = watch.judge(16.0)
    assert verdict is not None
    assert "rank 1 on node-1" in verdict.message
    assert "it was in actor_train/train_step of step 212 for 13 s" in verdict.message
    assert "Run the same command to go on" in verdict.message


def test_a_stopped_rank_is_found_although_others_get_on() -> None:
    watch = Watch(states(2), 10.0)
    watch.ranks[1].stopped = 50.0
    watch.ranks[0].progress = watch.ranks[1].progress = 60.0
    assert watch.judge(60.0) is None
    verdict = watch.judge(60.5)
    assert verdict is not None and "rank 1 on node-1 is stopped since" in verdict.message


def test_a_mistake_of_the_user_explains_what_broke_around_it() -> None:
    watch = Watch(states(3), 10.0)
    watch.ranks[0].ended, watch.ranks[0].words = 5.0, ("MRL-9001 broken socket", 70)
    assert watch.judge(5.0) is None  # others may have something better to say
    watch.ranks[2].ended, watch.ranks[2].words = 5.5, ("MRL-2102 the reward failed", 65)
    verdict = watch.judge(5.0 + GRACE_SECONDS)
    assert verdict is not None and verdict.message == "MRL-2102 the reward failed" and verdict.exit_code == 65


def test_a_killed_rank_explains_broken_sockets() -> None:
    watch = Watch(states(2), 10.0)
    watch.ranks[0].ended, watch.ranks[0].words = 5.0, ("MRL-9001 broken socket", 70)
    watch.ranks[1].ended, watch.ranks[1].returncode = 5.1, -9
    verdict = watch.judge(5.1)
    assert verdict is not None and verdict.exit_code == 70
    assert verdict.message.startswith("MRL-9002 rank 1 was ended by signal SIGKILL on node-1")


def test_ranks_that_end_with_their_launcher_say_so() -> None:
    watch = Watch(states(2), 10.0)
    watch.ranks[1].take_status({**watch.ranks[1].to_status(5.0), "ended": 0.1, "has_lost_parent": True}, 5.0)
    watch.ranks[0].ended = 5.0
    verdict = watch.judge(5.0)
    assert verdict is not None and verdict.exit_code == 70
    assert verdict.message.startswith(
        "MRL-9004 the launcher's process on node-1 was killed, and rank 1 with it; it was"
    )


@given(st.integers(1, 6), st.floats(0, 1e6), st.floats(0, 1e4), st.data())
def test_a_status_says_the_same_on_a_machine_with_another_clock(
    num_phases: int, now: float, shift: float, data: st.DataObject
) -> None:
    here = RankState(1, "a", now, now)
    for number in range(num_phases):
        here.take({"phase": f"p{number}", "at": data.draw(st.floats(0, now))})
    here.stopped = data.draw(st.none() | st.floats(0, now))
    there = RankState(1, "a", 0.0, 0.0)
    there.take_status(json.loads(json.dumps(here.to_status(now))), now + shift)
    assert there.place(now + shift) == here.place(now)
    assert there.progress - shift == pytest.approx(here.progress, abs=1e-6)  # sums of floats of this size
    assert (there.stopped is None) == (here.stopped is None)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.floats(1, 50), st.floats(0, 200))
def test_a_run_hangs_exactly_when_nobody_got_on_for_so_long(ages: list[float], timeout: float, now: float) -> None:
    watch = Watch(states(len(ages)), timeout)
    for rank, age in enumerate(ages):
        watch.ranks[rank].take({"step": 1, "phase": "p", "at": now - age})
        watch.ranks[rank].progress = now - age
    verdict = watch.judge(now)
    assert (verdict is not None) == all(now - (now - age) > timeout for age in ages)
    if verdict is not None:
        assert f"rank {ages.index(max(ages))} " in verdict.message or ages.count(max(ages)) > 1


# -- guards of real processes


Gang = Callable[..., list[subprocess.Popen[bytes]]]


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    """Starts one process per behaviour, each with its guard, and waits until all of them work."""
    started: list[subprocess.Popen[bytes]] = []
    errors = (tmp_path / "errors").open("wb")

    def start(*behaviours: str, timeout: float = 2.0) -> list[subprocess.Popen[bytes]]:
        for rank, behaviour in enumerate(behaviours):
            words = [str(rank), str(len(behaviours)), str(timeout), str(tmp_path), behaviour]
            command = [sys.executable, "-m", "tests.unit.guarded_rank", *words]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            started.append(subprocess.Popen(command, env=environment, stderr=errors, cwd=ROOT))
        wait_until(lambda: all((tmp_path / f"ready_{rank}").exists() for rank in range(len(behaviours))))
        if set(behaviours) <= {"works", "waits", "stuck"}:
            wait_until(lambda: num_reporting(tmp_path) == len(behaviours) - 1)
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
    errors.close()
    wait_until(lambda: guards_of(tmp_path) == [], 15.0)  # no guard outlives its rank for long


def guards_of(directory: Path) -> list[psutil.Process]:
    """Guards whose line is open to a rank of this test: they inherit its working directory and its stderr."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "megarl.launch.guard" in (process.info["cmdline"] or []):
            try:
                target = os.readlink(f"/proc/{process.pid}/fd/2")
            except OSError:
                continue
            if target.startswith(str(directory)):
                found.append(process)
    return found


def num_reporting(directory: Path) -> int:
    """Guards that are connected to the one that watches."""
    watch = watch_of(directory)
    return sum(one.status == psutil.CONN_ESTABLISHED for one in watch.net_connections())


def watch_of(directory: Path) -> psutil.Process:
    listening = [
        guard
        for guard in guards_of(directory)
        if any(one.status == psutil.CONN_LISTEN for one in guard.net_connections())
    ]
    assert len(listening) == 1
    return listening[0]


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank(victim: int, gang: Gang, tmp_path: Path) -> None:
    ranks = gang("works", "works")
    ranks[victim].send_signal(signal.SIGKILL)
    assert ranks[1 - victim].wait(PATIENCE) == 70
    wait_until(lambda: guards_of(tmp_path) == [])
    message = (tmp_path / "errors").read_text()
    assert message.startswith(f"MRL-9002 rank {victim} died on {socket.gethostname()} and left no message; it was in ")
    assert "actor_train/train_step of step 7" in message
    assert message.count("MRL-") == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank(victim: int, gang: Gang, tmp_path: Path) -> None:
    ranks = gang("waits", "waits")
    ranks[victim].send_signal(signal.SIGSTOP)
    (tmp_path / "enough").touch()
    assert [rank.wait(PATIENCE) for rank in ranks] == [69, 69]
    wait_until(lambda: guards_of(tmp_path) == [])
    message = (tmp_path / "errors").read_text()
    assert message.startswith(f"MRL-5301 rank {victim} on {socket.gethostname()} is stopped")
    assert message.count("MRL-") == 1
    for rank in range(2):
        assert "guarded_rank.py" in (tmp_path / f"stacks_rank_{rank}.txt").read_text()


def test_a_rank_whose_interpreter_is_stuck(gang: Gang, tmp_path: Path) -> None:
    ranks = gang("waits", "stuck")
    (tmp_path / "enough").touch()
    assert [rank.wait(PATIENCE) for rank in ranks] == [69, -signal.SIGKILL]
    wait_until(lambda: guards_of(tmp_path) == [])
    assert (tmp_path / "errors").read_text().count("MRL-5301") == 1
    for rank in range(2):
        assert "guarded_rank.py" in (tmp_path / f"stacks_rank_{rank}.txt").read_text()


def test_a_rank_that_fails_is_heard(gang: Gang, tmp_path: Path) -> None:
    ranks = gang("works", "fails", "works")
    assert [rank.wait(PATIENCE) for rank in ranks] == [65, 65, 65]
    wait_until(lambda: guards_of(tmp_path) == [])
    assert (tmp_path / "errors").read_text() == "MRL-2102 the reward failed\n"


def test_ranks_that_are_done_leave_nothing(gang: Gang, tmp_path: Path) -> None:
    ranks = gang("done", "done")
    assert [rank.wait(PATIENCE) for rank in ranks] == [0, 0]
    wait_until(lambda: guards_of(tmp_path) == [])
    assert (tmp_path / "errors").read_text() == ""
    assert list(tmp_path.glob("stacks_rank_*")) == []


def test_without_the_driver_and_its_guard_the_others_end(gang: Gang, tmp_path: Path) -> None:
    """As when the driver's machine is gone."""
    ranks = gang("works", "works", timeout=600)
    watch_of(tmp_path).kill()
    assert [rank.wait(PATIENCE) for rank in ranks] == [70, 69]


def test_a_machine_that_is_gone(gang: Gang, tmp_path: Path) -> None:
    """A rank and its guard vanish at once."""
    ranks = gang("works", "works", timeout=600)
    watch = watch_of(tmp_path)
    for guard in guards_of(tmp_path):
        if guard.pid != watch.pid:
            guard.kill()
    ranks[1].kill()
    assert ranks[0].wait(PATIENCE) == 69
    wait_until(lambda: guards_of(tmp_path) == [])
    message = (tmp_path / "errors").read_text()
    assert f"MRL-5302 rank 1 on {socket.gethostname()} is out of reach: its connection was lost; it was in " in message


def test_a_stranger_cannot_speak_to_the_watch(gang: Gang, tmp_path: Path) -> None:
    ranks = gang("works", "works", timeout=600)
    host, port, _ = json.loads((tmp_path / "hub").read_text())
    for words in (b'{"password": "x", "rank": 1, "host": "y"}\n', b"\xff" * 100 + b"\n[]\n{}\n"):
        with socket.create_connection((host, port)) as stranger, contextlib.suppress(ConnectionResetError):
            stranger.sendall(words)
            assert stranger.recv(1) == b""
    assert [rank.poll() for rank in ranks] == [None, None]
