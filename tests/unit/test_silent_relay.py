"""A relay for reward workers that stands still: it is missed, named once, and its samples are scored elsewhere."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import psutil
import pytest

from megarl.core.errors import EngineError
from megarl.rewards import Reward
from megarl.rewards.pool import WorkerPool
from megarl.rewards.relay_link import Relay, Relays
from megarl.rewards.worker_process import WorkerSpec
from tests.unit.test_hostile_rewards import outcome, parcel
from tests.unit.test_reward_relay import ATTACK, LOOPBACK, TOKEN, relay_at


@contextmanager
def relays_at(number: int) -> Iterator[tuple[Relays, list[psutil.Process]]]:
    with ExitStack() as stack:
        found = [stack.enter_context(relay_at()) for _ in range(number)]
        processes = [process for _, process in found]
        try:
            yield Relays(tuple(relays.places[0] for relays, _ in found), TOKEN), processes
        finally:
            for process in processes:  # a stopped one would not end
                process.send_signal(signal.SIGCONT)


def warnings_about(relay: Relay, log: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    return [line for line in lines if f"{relay.host}:{relay.port} " in line]


def wait_until_warm(pool: WorkerPool, num_workers: int) -> None:
    deadline = time.monotonic() + 60.0
    while sum(bool(worker.isolation) for worker in tuple(pool._workers)) < num_workers:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_when_one_of_two_relays_is_stopped_the_other_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """The limit of a sample is shorter than the silence after which a relay is missed by itself."""
    with relays_at(2) as (relays, processes):
        with closing(WorkerPool(WorkerSpec(ATTACK, timeout_seconds=3.0, relays=relays), 2)) as pool:
            wait_until_warm(pool, 2 + 1)
            processes[0].suspend()
            asked = [pool.submit(parcel("fine")) for _ in range(20)]
            assert [outcome(future) for future in asked] == [Reward(1.0)] * 20
        (said,) = warnings_about(relays.places[0], caplog)
        assert re.search(r"MRL-5324 the relay .* is lost: silent since \d\d:\d\d:\d\d\.", said)
        assert warnings_about(relays.places[1], caplog) == []


@pytest.mark.slow
def test_when_the_only_relay_is_stopped_the_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with relays_at(1) as (relays, processes):
        with closing(WorkerPool(WorkerSpec(ATTACK, timeout_seconds=60.0, relays=relays), 1)) as pool:
            assert outcome(pool.submit(parcel("fine"))) == Reward(1.0)
            processes[0].suspend()
            with pytest.raises(EngineError, match=r"MRL-5324 .*127\.0\.0\.1:\d+ cannot be used \(timed out\)"):
                outcome(pool.submit(parcel("sleep")))
        assert len(warnings_about(relays.places[0], caplog)) == 1


def test_a_relay_that_was_never_there_takes_no_work_from_the_other(caplog: pytest.LogCaptureFixture) -> None:
    """More workers would start there at once than may fail to."""
    with relays_at(1) as (relays, _):
        nobody = Relay(LOOPBACK, 9, 4)
        both = Relays((nobody, *relays.places), TOKEN)
        with closing(WorkerPool(WorkerSpec(ATTACK, relays=both), 6)) as pool:
            asked = [pool.submit(parcel("fine")) for _ in range(20)]
            assert [outcome(future) for future in asked] == [Reward(1.0)] * 20
        (said,) = warnings_about(nobody, caplog)
        assert "is lost: Connection refused." in said
