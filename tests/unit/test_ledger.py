"""The ledger loses nothing, reads back exactly, and fails with words when the disk does."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.core.errors import DataError, MissingInputError, StorageError
from megarl.trackers.ledger import Ledger, StepRecord, read_ledger, rewind


def test_every_device_is_in_the_ledger(tmp_path):
    """However many there are: trackers get summaries, the report's map and a resume need them all."""
    devices = {f"memory/actor_train/train_step/end/onload/max_allocated/{device}": 1.5 for device in range(40)}
    ledger = Ledger(tmp_path / "metrics.jsonl")
    ledger.log(devices, step=1)
    ledger.finish()
    assert read_ledger(tmp_path / "metrics.jsonl")[0].metrics == devices


def test_one_strict_json_object_per_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ledger = Ledger(path)
    ledger.log({"training/global_step": 1.0, "actor/lr": 1e-6, "mine": np.float64(0.1)}, step=1)
    ledger.log({"critic/score/mean": math.nan, "actor/grad_norm": math.inf, "actor/pg_loss": -math.inf}, step=2)
    first, second = path.read_text().splitlines()  # already there before finish
    assert '"metrics":{"actor/lr":1e-06,"training/global_step":1,"user/mine":0.1},"alerts":[],"meta":{}}' in first
    assert list(json.loads(first)) == ["step", "time", "run_id", "metrics", "alerts", "meta"]
    assert json.loads(second, parse_constant=pytest.fail)["metrics"] == {
        "actor/grad_norm": "Infinity",
        "actor/pg_loss": "-Infinity",
        "critic/score/mean": "NaN",
    }
    ledger.finish()
    record = read_ledger(path)[1]
    assert record.step == 2
    assert math.isnan(record.metrics["critic/score/mean"])
    assert record.metrics["actor/grad_norm"] == -record.metrics["actor/pg_loss"] == math.inf


@settings(max_examples=25)  # each writes and syncs a file
@given(st.lists(st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False), max_size=4), max_size=4))
def test_floats_and_names_read_back_exactly(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("ledger") / "metrics.jsonl"
    ledger = Ledger(path)
    for step, metrics in enumerate(steps):
        ledger.log({f"user/{name}": value for name, value in metrics.items()}, step)
    ledger.finish()
    assert [(record.step, record.metrics) for record in read_ledger(path)] == [
        (step, {f"user/{name}": value for name, value in metrics.items()}) for step, metrics in enumerate(steps)
    ]


def test_appending_continues_after_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step":1,"time":2.0,"metrics":{"actor/lr":0.5}}\n'
    path.write_text(whole + '{"step":2,"time":3.0,"met')
    assert read_ledger(path) == [StepRecord(1, 2.0, {"actor/lr": 0.5})]
    ledger = Ledger(path)
    ledger.log({"actor/lr": 0.25}, step=2)
    ledger.finish()
    assert path.read_text().startswith(whole)
    assert [(record.step, record.metrics["actor/lr"]) for record in read_ledger(path)] == [(1, 0.5), (2, 0.25)]


@pytest.mark.parametrize(
    "line", ["not json", "[]", '{"step":1,"time":2.0}', '{"step":1,"time":2.0,"metrics":{"a":"x"}}']
)
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"time":2.0,"metrics":{}}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"^MRL-2901 {tmp_path.name}/metrics\.jsonl:2 is not a step of a ledger"):
        read_ledger(path)


def test_a_missing_ledger_is_named(tmp_path):
    with pytest.raises(MissingInputError, match=r"MRL-4901 .*metrics\.jsonl does not exist"):
        read_ledger(tmp_path / "metrics.jsonl")


def test_a_full_disk_stops_the_run():
    ledger = Ledger(Path("/dev/full"))
    with pytest.raises(StorageError, match=r"^MRL-7001 dev/full cannot be written: No space left on device") as caught:
        ledger.log({"actor/lr": 0.5}, step=1)
    assert caught.value.exit_code == 74


def test_a_directory_that_is_not_there_is_an_error_with_words(tmp_path):
    with pytest.raises(StorageError, match=r"MRL-7001 gone/metrics\.jsonl cannot be written: No such file"):
        Ledger(tmp_path / "gone" / "metrics.jsonl")


# A file-size limit breaks off the second line half way, as a disk does that becomes full.
NEARLY_FULL = """
import resource, signal, sys
from pathlib import Path
from megarl.core.errors import StorageError
from megarl.trackers.ledger import Ledger
path = Path(sys.argv[1])
ledger = Ledger(path)
ledger.log({"actor/lr": 0.5}, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = path.stat().st_size + 10
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    ledger.log({"actor/lr": 0.25}, 2)
except StorageError:
    sys.exit(74)
"""


def test_a_line_that_does_not_fit_leaves_no_trace(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert subprocess.run([sys.executable, "-c", NEARLY_FULL, str(path)], check=False).returncode == 74
    assert path.read_bytes().count(b"\n") == 1
    assert path.read_bytes().endswith(b"\n")
    assert [record.step for record in read_ledger(path)] == [1]


def test_rewinding_cuts_the_steps_that_will_be_made_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ledger = Ledger(path)
    for step in range(4):
        ledger.log({"actor/lr": step / 4}, step)
        if step == 2:
            kept = ledger.sync()
    ledger.finish()
    with path.open("ab") as file:
        file.write(b'{"step":4,"ti')
    before = path.read_bytes()
    records = rewind(path, 2)
    assert [record.step for record in records] == [0, 1, 2]
    assert path.read_bytes() == before[:kept]
    assert read_ledger(path) == records
    assert rewind(path, -1) == []
    assert path.read_bytes() == b""
    assert rewind(tmp_path / "none.jsonl", 3) == []
