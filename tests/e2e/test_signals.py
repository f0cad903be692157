"""Asked to stop: the step is finished, everything is saved, and the same command goes on."""

from __future__ import annotations

import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megarl.checkpoint.store import newest_step
from tests.e2e.runs import QUICKSTART, SHORT, Outcome, ledger, ranks_of, running, train

pytestmark = pytest.mark.slow

# Says that it was reached, and then waits for something that never comes.
STUCK = """
import threading

def stuck(group):
    print("stuck", flush=True)
    threading.Event().wait()
"""


# (SIGINT is sent by the test of the second request)
@pytest.mark.parametrize(("sent", "to"), [(signal.SIGTERM, "megarl"), (signal.SIGUSR1, "rank 1")])
def test_a_request_to_stop_loses_nothing(sent: signal.Signals, to: str, tmp_path: Path) -> None:
    settings = (*SHORT, "warmup=null", "eval.every=0", "checkpoint.every=0")
    with running(tmp_path, "step:2 ", *settings, "run.num_steps=500") as process:
        if to == "megarl":
            process.send_signal(sent)
        else:
            ranks = psutil.Process(process.pid).children()
            next(rank for rank in ranks if rank.environ()["RANK"] == "1").send_signal(sent)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert ranks_of(tmp_path) == []
    assert f"MRL-8001 stopped by {sent.name} after step" in stderr
    assert "Run the same command" in stderr
    stopped = Outcome(75, stdout, stderr, tmp_path / "quickstart")
    step = ledger(stopped)[-1]["step"]
    assert newest_step(stopped.directory / "checkpoints") == step >= 2
    resumed = train(QUICKSTART, tmp_path, *settings, f"run.num_steps={step + 1}")
    assert resumed.code == 0, resumed.stderr
    assert f"Resuming at step {step + 1} of {step + 1} from checkpoints/step_{step:06d} (restart 1)" in resumed.stdout
    assert f"Changed since step {step}: run.num_steps: was 500, is {step + 1}" in resumed.stdout
    assert [record["step"] for record in ledger(resumed)] == list(range(step + 2))


def test_the_second_request_leaves_at_once_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    (tmp_path / "my_filters.py").write_text(STUCK)
    settings = (*SHORT, "eval.every=0", "eval.before_training=false", "eval.at_end=false", "run.num_steps=1")
    saving = ("checkpoint.every=1", "checkpoint.asynchronous=false")
    stuck = "rollout.filters=[my_filters:stuck]"
    with running(tmp_path, "stuck", *settings, *saving, stuck) as process:
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.3)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert ranks_of(tmp_path) == []
    resumed = train(QUICKSTART, tmp_path, *settings, *saving)
    assert resumed.code == 0, resumed.stderr
    assert "Resuming at step 4 of 4" in resumed.stdout
    assert "rollout.filters: was" in resumed.stdout
    finished = train(QUICKSTART, tmp_path, *settings, *saving)
    assert finished.code == 0
    assert "all 4 steps are done" in finished.stdout
    assert finished.steps == []
