"""What a report reads from a ledger: columns, memory by device, alerts; and what it makes of damage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megarl.core.errors import MissingInputError
from megarl.report.history import read_history
from megarl.report.phase_time import OTHER, phase_time
from tests.unit.report_runs import KINDS, line, make_run, write_ledger


def test_columns_hold_what_the_ledger_says(tmp_path: Path) -> None:
    metrics = [{"actor/lr": 1e-6, "steps": 3}, {"actor/lr": "NaN", "odd": [1]}, {"actor/lr": "-Infinity"}]
    write_ledger(tmp_path, [line(step, values) for step, values in enumerate(metrics)])
    history = read_history(tmp_path)
    assert history.columns.keys() == {"actor/lr", "steps"}
    assert history.columns["actor/lr"].steps.tolist() == [0, 1, 2]
    first, second, third = history.columns["actor/lr"].values.tolist()
    assert (first, third) == (1e-6, -math.inf)
    assert math.isnan(second)
    assert (history.last_step, history.num_records, history.run_id) == (2, 3, None)


@pytest.mark.parametrize("tail", [b'{"step": 3, "time": 1.0, "metr', b'{"step":3,"time":1.0,"metrics":{"a":1}}'])
def test_an_unfinished_last_line_is_left_out(tmp_path: Path, tail: bytes) -> None:
    write_ledger(tmp_path, [line(1, {"a": 1.0}), line(2, {"a": 2.0})])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    history = read_history(tmp_path)
    assert history.columns["a"].steps.tolist() == [1, 2]
    assert history.num_damaged == 0


@pytest.mark.parametrize(
    "damage", ["garbage", "[]", "3", '{"step":"x","time":1,"metrics":{}}', '{"step":1}', "\xff", "[" * 9999]
)
def test_damaged_lines_are_counted_not_believed(tmp_path: Path, damage: str) -> None:
    good = [json.dumps(line(step, {"a": float(step)})) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join([good[0], damage, good[1], ""]).encode("latin-1"))
    history = read_history(tmp_path)
    assert history.num_damaged == 1
    assert history.columns["a"].steps.tolist() == [1, 2]


def test_without_a_ledger_or_without_steps_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(MissingInputError, match="MRL-4901"):
        read_history(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(MissingInputError, match="MRL-4902"):
        read_history(tmp_path)


def test_memory_of_few_devices_keeps_every_curve(tmp_path: Path) -> None:
    history = read_history(make_run(tmp_path / "run", num_steps=5, num_devices=2, kinds=KINDS))
    columns = dict(history.memory.columns())
    assert len(columns) == 8 * len(KINDS) * 2
    assert len(columns["memory/critic/train_step/end/onload/max_reserved/1"].steps) == 5
    assert not any(name.startswith("memory/") for name in history.columns)


def test_memory_of_many_devices_is_folded(tmp_path: Path) -> None:
    name = "memory/actor_train/train_step/end/onload/max_reserved"
    rows = [{f"{name}/{device}": 10.0 * device + step for device in range(12)} for step in (1, 2, 3)]
    rows[1][f"{name}/3"] = 99.0
    write_ledger(tmp_path, [line(step, row) for step, row in enumerate(rows, start=1)])
    history = read_history(tmp_path)
    columns = dict(history.memory.columns())
    assert list(columns) == [f"{name}/[largest of 12 devices]", f"{name}/[smallest of 12 devices]"]
    assert columns[f"{name}/[largest of 12 devices]"].values.tolist() == [111.0, 112.0, 113.0]
    heat_map = history.memory.heat_map()
    assert heat_map is not None
    assert heat_map["phases"] == ["actor_train/train_step"]
    measure = heat_map["measures"]["max_reserved"]
    assert measure["peak"][0][3] == 99
    assert measure["latest"][0][3] == 33
    assert measure["names"] == [name]


def test_memory_that_is_not_finite_does_not_count(tmp_path: Path) -> None:
    name = "memory/a/b/end/onload/max_reserved/0"
    write_ledger(tmp_path, [line(1, {name: 5.0}), line(2, {name: "Infinity"})])
    heat_map = read_history(tmp_path).memory.heat_map()
    assert heat_map is not None
    assert heat_map["measures"]["max_reserved"]["peak"] == [[5]]


def test_alerts_are_gathered_by_rule(tmp_path: Path) -> None:
    spike = {"rule": "H09", "severity": 3, "message": "spike"}
    later = {"rule": "H09", "severity": 2, "message": "smaller spike"}
    lines = [
        line(1, {}, alerts=[spike, "odd"]),
        line(2, {"alerts/H02": 0, "alerts/H03": 1}),
        line(9, {}, alerts=[later]),
    ]
    write_ledger(tmp_path, lines)
    rows = read_history(tmp_path).alerts.rows()
    assert [(row["rule"], row["severity"], row["count"]) for row in rows] == [("H09", 3, 2), ("H03", 1, 1)]
    assert (rows[0]["first"], rows[0]["last"], rows[0]["message"]) == (1, 9, "smaller spike")


def test_phases_stack_up_to_the_wall(tmp_path: Path) -> None:
    history = read_history(make_run(tmp_path / "run", num_steps=50, num_devices=1))
    time = phase_time(history.columns)
    assert time is not None
    stacked = [sum(layer["seconds"][at] for layer in time["layers"]) for at in range(50)]
    assert stacked == pytest.approx(time["wall"], rel=1e-4)  # six digits of each number are kept
    assert sum(row["total"] for row in time["table"]) == pytest.approx(time["wall_total"])
    assert time["table"][-1]["name"] == OTHER
    shares = [row["share"] for row in time["table"][:-1]]
    assert shares == sorted(shares, reverse=True)


def test_a_long_run_is_stacked_by_means(tmp_path: Path) -> None:
    rows = [{"timing_s/step_wall": 2.0 + step % 2, "timing_s/gen": 1.0, "timing_s/step": 2.0} for step in range(2000)]
    write_ledger(tmp_path, [line(step, row) for step, row in enumerate(rows)])
    time = phase_time(read_history(tmp_path).columns)
    assert time is not None
    assert time["stretch"] == 4
    assert time["wall"] == [2.5] * 500
    assert [layer["name"] for layer in time["layers"]] == ["gen", OTHER]
    assert phase_time({}) is None
