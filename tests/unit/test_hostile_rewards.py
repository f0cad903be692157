"""Reward functions that do their worst: scoring goes on, neighbours get what they deserve, nothing is left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from megarl.core.errors import ConfigError, DataError
from megarl.core.sample import Prompt, Sample
from megarl.rewards import Reward
from megarl.rewards.outcome import Failure
from megarl.rewards.parcel import unwrap, wrap
from megarl.rewards.pool import WorkerPool
from megarl.rewards.start_worker import environment
from megarl.rewards.worker_process import WorkerSpec
from tests.unit.hostile_functions import ATTACKS

TIMEOUT_SECONDS = 1.0
# The promise is one second; the machine that runs the tests may be busy with others.
OVERRUN_SECONDS = 1.0

SLOW, ENDED, RAISED, WRONG = "took too long", "ended its worker", "raised an exception", "returned no finite number"
HARMLESS = Reward(0.5)
# what becomes of each attack; several, where it depends on who is faster
EXPECTED: dict[str, set[str] | Reward] = {
    "loop": {SLOW},
    "loop without signals": {SLOW},
    "sleep": {SLOW},
    "slow pattern": {SLOW},
    "recurse": {RAISED},
    "recurse in C": {ENDED, RAISED, SLOW},
    "many forks": {ENDED, SLOW},
    "fork bomb": {ENDED, SLOW},
    "leave daemon": HARMLESS,
    "allocate": {RAISED},
    "allocate shared": {RAISED},
    "exit hard": {ENDED},
    "exit soft": {RAISED},
    "interrupt": {"failed"},
    "abort": {ENDED},
    "crash": {ENDED},
    "close streams": HARMLESS,
    "close everything": {ENDED},
    "print a gigabyte": {SLOW, "0.5"},
    "write to all descriptors": {"broke the connection"},
    "SIGKILL to itself": {ENDED},
    "SIGSTOP to itself": {SLOW},
    "SIGKILL to its parent": HARMLESS,
    "SIGKILL to its group": {ENDED},
    "SIGKILL to everybody": {ENDED, "raised an exception"},
    "mutate": HARMLESS,
    "ruin directory": HARMLESS,
    "ruin environment": HARMLESS,
    "leave threads": HARMLESS,
    "patch json": HARMLESS,
    "patch builtins": {ENDED, "failed", "raised an exception"},
    "patch itself": HARMLESS,
    "read secrets": Reward(0.0),
    "raise badly": {RAISED},
    "NaN": {WRONG},
    "infinite": {WRONG},
    "None": {WRONG},
    "text": {WRONG},
    "bool": {WRONG},
    "list": {WRONG},
    "nested": {WRONG},
    "array": {WRONG},
    "huge number": {WRONG},
    "huge text": {WRONG},
    "huge scores": {WRONG},
    "odd scores": {WRONG},
}


def parcel(response: str) -> bytes:
    prompt = Prompt("hostile:1", "?", np.arange(4), "42", metadata={"level": 3})
    sample = Sample(np.arange(6), np.array([0] * 4 + [1] * 2, np.int8), np.zeros(6, np.float32), "stop", response)
    return wrap(prompt, sample)


@contextmanager
def pool_of(name: str, num_workers: int = 2, log: Path | None = None, **limits: float) -> Iterator[WorkerPool]:
    """Workers for a function, and the certainty that nothing of them is left."""
    limits = {"timeout_seconds": TIMEOUT_SECONDS, **limits}
    before = processes()
    pool = WorkerPool(WorkerSpec(name, {}, log=log, **limits), num_workers)  # type: ignore[arg-type]
    with closing(pool):
        yield pool
    # Guards are gone when close returns; the kernel may still be putting away what they ended.
    psutil.wait_procs(left := processes() - before, timeout=5)
    assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def processes() -> set[psutil.Process]:
    """Everything below this process, and whatever worker there is below nobody."""
    return set(psutil.Process().children(recursive=True))


def outcome(future: Future[Reward | Failure]) -> Reward | Failure:
    return future.result(timeout=60)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Reward | Failure]]:
    """All attacks at once, each between two innocent neighbours."""
    log = tmp_path_factory.mktemp("logs") / "reward.log"
    keeper = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={**os.environ, "API_KEY": "very-secret-value"}
    )
    os.environ["API_KEY"] = "very-secret-value"
    try:
        with pool_of("tests.unit.hostile_functions:attack", log=log) as pool:
            asked = {}
            for attack in ATTACKS:
                asked[f"before {attack}"] = pool.submit(parcel("fine"))
                asked[attack] = pool.submit(parcel(attack))
                asked[f"after {attack}"] = pool.submit(parcel("fine"))
            yield {name: outcome(future) for name, future in asked.items()}
    finally:
        del os.environ["API_KEY"]
        keeper.communicate(b"\n")
    assert log.stat().st_size <= 1 << 20, "a gigabyte was printed"


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_hurts_only_itself(attack: str, outcomes: dict[str, Reward | Failure]) -> None:
    expected, got = EXPECTED[attack], outcomes[attack]
    if isinstance(expected, Reward):
        assert got == expected
    else:
        assert (got.kind if isinstance(got, Failure) else str(got.value)) in expected, got
    assert outcomes[f"before {attack}"] == outcomes[f"after {attack}"] == Reward(1.0)


def test_every_attack_is_expected() -> None:
    assert EXPECTED.keys() == ATTACKS.keys()
    assert len(ATTACKS) >= 25


def test_the_limit_is_kept() -> None:
    with pool_of("tests.unit.hostile_functions:attack", 1, timeout_seconds=0.5) as pool:
        assert outcome(pool.submit(parcel("fine"))) == Reward(1.0)
        for attack in ("loop without signals", "SIGSTOP to itself", "slow pattern"):
            outcome(pool.submit(parcel("fine")))  # the next worker is there
            began = time.monotonic()
            failure = outcome(pool.submit(parcel(attack)))
            assert isinstance(failure, Failure)
            assert failure.kind == SLOW
            assert 0.5 <= time.monotonic() - began <= 0.5 + OVERRUN_SECONDS


def test_async_functions_are_cancelled_on_time_and_neighbours_are_scored_again() -> None:
    with pool_of("tests.unit.hostile_functions:async_attack", 1, timeout_seconds=0.5) as pool:
        asked = [pool.submit(parcel(word)) for word in ("fine", "wait", "fine", "loop", "exit hard", "NaN", "fine")]
        kinds = [got.kind if isinstance(got, Failure) else got.value for got in map(outcome, asked)]
    assert kinds == [1.0, SLOW, 1.0, SLOW, ENDED, WRONG, 1.0]


def test_many_async_calls_share_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import asyncio\nasync def wait(prompt, sample):\n    await asyncio.sleep(0.3)\n    return 1\n"
    (tmp_path / "waiting_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pool_of("waiting_rewards:wait", 1, timeout_seconds=10.0) as pool:
        outcome(pool.submit(parcel("x")))
        began = time.monotonic()
        assert {outcome(future).value for future in [pool.submit(parcel("x")) for _ in range(64)]} == {1.0}  # type: ignore[union-attr]
        assert time.monotonic() - began < 64 * 0.3 / 4, "one after the other they would take 19 s"


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ("1 / 0", ConfigError, "ZeroDivisionError"),
        ("import sys; sys.exit(0)", ConfigError, "SystemExit"),
        ("import os; os._exit(5)", DataError, "exit code 5"),
        ("import time; time.sleep(1000)", DataError, "not ready after 1 seconds"),
        ("def score(prompt): return 1.0", ConfigError, "MRL-1408"),
        ("def other(prompt, sample): return 1.0", ConfigError, "other"),
    ],
    ids=["raises", "exits", "exits hard", "hangs", "signature", "no such function"],
)
def test_a_module_that_cannot_be_imported(
    source: str, error: type[Exception], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_module.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    patience = 1.0 if "sleep" in source else 60.0
    with pool_of("bad_module:score", 1, start_timeout_seconds=patience) as pool, pytest.raises(error, match=told):
        outcome(pool.submit(parcel("fine")))


def test_a_killed_trainer_leaves_no_worker(tmp_path: Path) -> None:
    program = (
        "from megarl.rewards.pool import WorkerPool\nfrom megarl.rewards.worker_process import WorkerSpec\n"
        "from tests.unit.test_hostile_rewards import parcel\n"
        "pool = WorkerPool(WorkerSpec('tests.unit.hostile_functions:attack'), 2)\n"
        "pool.submit(parcel('leave daemon')).result()\n"
        "print('ready', flush=True)\npool.submit(parcel('sleep')).result()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    below = psutil.Process(trainer.pid).children(recursive=True)
    assert len(below) >= 3 * 3, "guards, first processes and workers"
    trainer.kill()
    trainer.communicate()
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert list(tmp_path.iterdir()) == [], "scratch directories are removed by their guards"


def test_samples_arrive_as_they_were_sent() -> None:
    prompt, sample = unwrap(parcel("\ud800 \x00 é"))
    assert (prompt.id, prompt.answer, prompt.metadata) == ("hostile:1", "42", {"level": 3})
    assert (sample.response, sample.loss_mask.tolist()) == ("\ud800 \x00 é", [0, 0, 0, 0, 1, 1])


def test_a_worker_knows_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "MY_PASSWORD"):
        monkeypatch.setenv(name, "very-secret-value")
    assert "very-secret-value" not in environment("/tmp").values()


def test_without_namespaces_nothing_is_left_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not allow namespaces, the guard adopts what a worker leaves behind, and ends it."""
    forbid = "import megarl.rewards.guard as guard\nguard._isolate = lambda: 'process tree'\n"
    (tmp_path / "sitecustomize.py").write_text(forbid)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    log = tmp_path / "reward.log"
    with pool_of("tests.unit.hostile_functions:attack", 1, log=log) as pool:
        asked = [
            pool.submit(parcel(word)) for word in ("fine", "leave daemon", "loop without signals", "crash", "fine")
        ]
        kinds = [got.kind if isinstance(got, Failure) else got.value for got in map(outcome, asked)]
    assert kinds == [1.0, 0.5, SLOW, ENDED, 1.0]
    assert "isolation: process tree" in log.read_text()
