"""Several rewards with weights, the policy for failures, and that scoring begins before anybody waits for it."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megarl.config.rewards import RewardSettings
from megarl.config.scoring import ScoringSettings
from megarl.core.errors import ConfigError, DataError
from megarl.core.sample import Group, Prompt, Sample
from megarl.metrics.meter import Meter
from megarl.metrics.values import Sum
from megarl.rewards.driver_calls import DriverCalls
from megarl.rewards.outcome import Failure, from_reply
from megarl.rewards.reward import Reward, RewardFunction
from megarl.rewards.scorer import Scorer
from megarl.rewards.trial import try_reward
from megarl.rewards.worker_calls import WorkerCalls

MODULE = """
from pathlib import Path
from megarl.rewards import Reward

def length(prompt, sample, scale=1):
    return Reward(scale * len(sample.response), {"words": len(sample.response.split()), "length": 7})

def fragile(prompt, sample):
    return 1 / len(sample.response)

def touch(prompt, sample, file):
    Path(file).touch()
    return 1.0

def true(prompt, sample):
    return True

def hang(prompt, sample):
    while True: pass
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))


def group_of(*responses: str) -> Group:
    nothing = np.zeros(1, np.int64), np.zeros(1, np.int8), np.zeros(1, np.float32)
    return Group(
        Prompt("rows.jsonl:3", "6*7=", np.zeros(1, np.int64), "42"),
        [Sample(*nothing, "stop", response, seed=seed) for seed, response in enumerate(responses)],
    )


def scorer_of(*rewards: dict[str, Any], **settings: Any) -> Scorer:
    settings = {"num_workers": 1, **settings}
    return Scorer([RewardSettings(**reward) for reward in rewards], ScoringSettings(**settings))


@pytest.fixture
def fragile() -> Iterator[Scorer]:
    with closing(scorer_of({"name": "own_rewards:fragile"}, max_failed_fraction=0.5)) as scorer:
        yield scorer


def test_a_single_reward_is_logged_by_its_name() -> None:
    group = group_of("42", "41")
    with closing(scorer_of({"name": "exact_match"})) as scorer:
        assert scorer.finish([group], Meter()) == [group]
    assert [(sample.reward, sample.scores) for sample in group.samples] == [
        (1.0, {"exact_match": 1.0}),
        (0.0, {"exact_match": 0.0}),
    ]


def test_several_rewards_are_added_with_their_weights_and_logged_apart() -> None:
    group = group_of("42", "4 2")
    rewards = (
        {"name": "exact_match", "weight": 2.0},
        {"name": "own_rewards:length", "weight": -0.5, "options": {"scale": 10}},
        {"name": "own_rewards:length", "label": "unused", "weight": 0.0},
    )
    with closing(scorer_of(*rewards)) as scorer:
        scorer.finish([group], Meter())
    assert [sample.reward for sample in group.samples] == [2.0 - 10.0, -15.0]
    assert group.samples[1].scores == {
        "exact_match": 0.0, "length": 30.0, "length.words": 2.0, "length.length": 7.0,
        "unused": 3.0, "unused.words": 2.0, "unused.length": 7.0,
    }  # fmt: skip


def test_scores_of_a_single_reward_keep_their_names() -> None:
    group = group_of("4 2")
    with closing(scorer_of({"name": "own_rewards:length"})) as scorer:
        scorer.finish([group], Meter())
    assert group.samples[0].scores == {"length": 3.0, "words": 2.0, "length.length": 7.0}


def test_a_failed_sample_takes_its_group_with_it(fragile: Scorer, caplog: pytest.LogCaptureFixture) -> None:
    groups = [group_of("a", "bb"), group_of("a", ""), group_of("", "ccc"), group_of("dddd", "a")]
    meter = Meter()
    with caplog.at_level(logging.WARNING):
        kept = fragile.finish(groups, meter)
    assert kept == [groups[0], groups[3]]
    failed = groups[1].samples[1]
    assert failed.reward is None
    assert failed.scores == {}
    assert "ZeroDivisionError" in failed.failure
    assert "own_rewards.py:9" in failed.failure
    assert groups[1].samples[0].reward == 1.0, "its neighbour has what it earned"
    assert [record.getMessage().split(". One")[0] for record in caplog.records] == [
        'reward "own_rewards:fragile" raised an exception for 2 of 8 samples'
    ]
    counts = {
        name: meter.statistics[f"experience_pipeline/{name}"] for name in ("num_failed_samples", "num_failed_groups")
    }
    assert list(counts.values()) == [Sum(2), Sum(2)]


def test_an_evaluation_keeps_what_failed(fragile: Scorer) -> None:
    group = group_of("a", "")
    assert fragile.finish_all([group]) == 1
    assert [sample.reward for sample in group.samples] == [1.0, None]


def test_too_many_failures_end_the_run(fragile: Scorer) -> None:
    with pytest.raises(DataError) as caught:
        fragile.finish([group_of("", "", "", "a")], Meter())
    assert caught.value.exit_code == 65
    message = str(caught.value)
    assert message.startswith('MRL-2120 reward "own_rewards:fragile" failed for 3 of 4 samples; ')
    assert "scoring.max_failed_fraction=0.5" in message
    assert "ZeroDivisionError" in message


def test_a_refill_counts_with_the_rest_of_its_step(fragile: Scorer) -> None:
    """Half of the samples may fail, of a step: not of each of its refills, which may be one group."""
    good = group_of(*"abcd")
    assert fragile.finish([good], Meter()) == [good]
    assert fragile.finish([group_of("", "", "a")], Meter(), is_refill=True) == []
    with pytest.raises(DataError, match="failed for 6 of 11 samples"):
        fragile.finish([group_of("", "", "", "")], Meter(), is_refill=True)


def test_a_worker_that_replies_with_a_number_beyond_all_floats_has_given_none() -> None:
    assert isinstance(from_reply({"value": 10**400, "scores": {}}), Failure)
    assert isinstance(from_reply({"value": 1, "scores": {"a": 10**400}}), Failure)


def test_one_failure_is_enough_if_asked_for() -> None:
    with closing(scorer_of({"name": "own_rewards:fragile"}, on_failure="stop")) as scorer:
        scorer.finish([group_of("a", "b")], Meter())
        with pytest.raises(DataError, match=r"scoring\.on_failure is stop"):
            scorer.finish([group_of("a", *"bcdefghijk", "")], Meter())


def test_scoring_begins_before_anybody_waits(tmp_path: Path) -> None:
    file = tmp_path / "scored"
    group = group_of("x")
    with closing(scorer_of({"name": "own_rewards:touch", "options": {"file": str(file)}})) as scorer:
        scorer.submit(group.prompt, group.samples[0])
        deadline = time.monotonic() + 30
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert file.exists()
        assert group.samples[0].reward is None, "nobody may see a reward before it is asked for"
        file.unlink()
        scorer.finish([group], Meter())
        assert group.samples[0].reward == 1.0
        assert not file.exists(), "scored once"


def test_ranks_without_samples_start_nothing() -> None:
    before = len(psutil.Process().children())
    with closing(scorer_of({"name": "own_rewards:length"})) as scorer:
        assert scorer.finish([], Meter()) == []
        assert len(psutil.Process().children()) == before


def test_a_function_that_cannot_be_imported_is_the_users_mistake() -> None:
    with closing(scorer_of({"name": "own_rewards:nothing"})) as scorer, pytest.raises(ConfigError, match="MRL-1303"):
        scorer.finish([group_of("x")], Meter())


def test_async_functions_of_the_driver_are_bounded_and_cancelled() -> None:
    running, most = 0, 0

    async def watch(prompt: Prompt, sample: Sample) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await asyncio.sleep(1000 if sample.response == "late" else 0.01)
        finally:
            running -= 1
        return float(sample.seed)

    group = group_of(*["x"] * 20, "late")
    with closing(DriverCalls(RewardFunction("watch", watch), 1.0, max_concurrency=7)) as calls:
        futures = [calls.submit(group.prompt, sample) for sample in group.samples]
        outcomes = [future.result(timeout=30) for future in futures]
    assert outcomes[:20] == [Reward(float(seed)) for seed in range(20)]
    late = outcomes[20]
    assert isinstance(late, Failure)
    assert late.kind == "took too long"
    assert (most, running) == (7, 0)


def test_a_trial_says_what_the_function_gave() -> None:
    prompt, settings = group_of().prompt, ScoringSettings(timeout_seconds=0.5)
    assert try_reward(RewardSettings(name="own_rewards:length"), settings, prompt).startswith(
        "reward \"own_rewards:length\": 2 for its own answer to prompt 'rows.jsonl:3'"
    )
    assert try_reward(RewardSettings(), settings, prompt) == 'reward "exact_match": built in'
    with pytest.raises(ConfigError, match="MRL-1408"):
        try_reward(RewardSettings(name="own_rewards:length", options={"scal": 1}), settings, prompt)
    with pytest.raises(DataError, match=r"MRL-2112 .*took too long"):
        try_reward(RewardSettings(name="own_rewards:hang"), settings, prompt)
    with pytest.raises(DataError, match=r"MRL-2103 .*returned True \(bool\).*\n +Expected a number or Reward"):
        try_reward(RewardSettings(name="own_rewards:true"), settings, prompt)


def test_relative_imports_start_at_the_runs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `megarl` puts it: the working directory is on the path, and the worker itself is somewhere else."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "rewards.py").write_text(
        "import os\ndef cwd(prompt, sample): return float(len(os.listdir()))"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    group = group_of("x")
    with closing(scorer_of({"name": "package.rewards:cwd"})) as scorer:
        scorer.finish([group], Meter())
    assert group.samples[0].reward is not None
    assert group.samples[0].reward < len(os.listdir(tmp_path)), "its directory is its own"


def test_a_spare_worker_has_imported_the_function_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "slow_to_import.py").write_text(
        f"import secrets\nfrom pathlib import Path\nPath({str(marks)!r}, secrets.token_hex(8)).touch()\n"
        "def good(prompt, sample):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with closing(scorer_of({"name": "slow_to_import:good"}, num_workers=1)) as scorer:
        scorer.start()
        deadline = time.monotonic() + 60
        while len(list(marks.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(list(marks.iterdir())) == 2, "one for the only seat, one to take its place"


def test_the_reward_model_may_be_named_twice() -> None:
    class Lengths:
        def score(self, groups: Sequence[Group]) -> list[list[float]]:
            return [[float(len(sample.response)) for sample in group.samples] for group in groups]

    group = group_of("a", "bbb")
    with closing(scorer_of({"name": "model"}, {"name": "model", "label": "again", "weight": 10.0})) as scorer:
        scorer.judge_with(Lengths())
        waiter = threading.Thread(target=scorer.finish, args=([group], Meter()), daemon=True)
        waiter.start()
        waiter.join(60)
        assert not waiter.is_alive()
    assert [sample.reward for sample in group.samples] == [11.0, 33.0]


def test_a_machine_that_starts_no_more_processes_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second failure is tried again in a new worker; in its place another one would be started."""
    start, num_started = subprocess.Popen, itertools.count(1)

    def refuse_the_third(*arguments: Any, **options: Any) -> Any:
        if next(num_started) > 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse_the_third)
    calls = WorkerCalls(RewardSettings(name="own_rewards:fragile"), ScoringSettings(num_workers=1))
    with closing(calls):
        group = group_of("", "")
        first, second = (calls.submit(group.prompt, sample) for sample in group.samples)
        assert isinstance(first.result(60), Failure)
        with pytest.raises(DataError, match=r"MRL-2111 .*Resource temporarily unavailable"):
            second.result(60)


def test_a_driver_that_dies_while_workers_start_leaves_no_directories(tmp_path: Path) -> None:
    code = (
        "import os\nfrom megarl.rewards.pool import WorkerPool\nfrom megarl.rewards.worker_process import WorkerSpec\n"
        "pool = WorkerPool(WorkerSpec('own_rewards:fragile'), 1)\n"
        # both are started, and have not come far
        "while len(pool.pids) < 2: pass\nos._exit(0)"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}
    (tmp_path / "own_rewards.py").unlink()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    deadline = time.monotonic() + 30
    while os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.listdir(tmp_path) == []
