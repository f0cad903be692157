"""What `megarl eval` evaluates, where it writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl import cli
from megarl.checkpoint.store import newest_good_step
from megarl.config.load import load_config
from megarl.core.errors import ConfigError, MissingInputError
from megarl.run.candidate import find_candidate
from megarl.run.choose_step import open_step
from megarl.run.evaluation_plan import config_to_evaluate, new_directory
from megarl.run.evaluation_session import write_whole
from megarl.run.evaluation_table import evaluation_table
from tests.unit.checkpoints import numbers, save_layout, whole
from tests.unit.config_files import MINIMAL, QUICKSTART, load_text

BENCH = "eval.bench_sets.last={data: builtin:sort_held_out, num_samples: 4, temperature: 1}"


def test_a_hugging_face_directory_takes_the_place_of_the_model(tmp_path: Path) -> None:
    config = load_config(QUICKSTART)
    assert config.model.config is not None
    (tmp_path / "config.json").write_text(json.dumps({**config.model.config, "num_hidden_layers": 3}))
    own_tokenizer = load_config(QUICKSTART, find_candidate(tmp_path, None).overrides).model
    assert (own_tokenizer.path, own_tokenizer.config) == (str(tmp_path), None)
    assert own_tokenizer.tokenizer == "builtin:characters", "there is none in the directory"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert load_config(QUICKSTART, find_candidate(tmp_path, None).overrides).model.tokenizer is None
    assert find_candidate(None, None).overrides == []


def test_what_is_neither_a_run_nor_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(QUICKSTART), "--model", str(tmp_path)]) == 66
    assert "MRL-4202" in capsys.readouterr().err
    assert cli.main(["eval", str(QUICKSTART), "--step", "3"]) == 64
    assert "MRL-1490" in capsys.readouterr().err
    assert cli.main(["eval", str(QUICKSTART), "--step", "last"]) == 64
    assert "'last' is neither a number nor best" in capsys.readouterr().err
    (tmp_path / "resolved.yaml").touch()
    assert cli.main(["eval", str(QUICKSTART), "--model", str(tmp_path)]) == 66
    assert "MRL-4201" in capsys.readouterr().err


def test_sets_are_chosen_by_name(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [BENCH])
    assert [name for _, name, _ in config_to_evaluate(config, []).eval_sets] == ["held_out", "last"]
    assert [name for _, name, _ in config_to_evaluate(config, ["last"]).eval_sets] == ["last"]
    with pytest.raises(ConfigError, match=r"MRL-1491 --set first: .*\n.*held_out, last"):
        config_to_evaluate(config, ["first"])
    with pytest.raises(ConfigError, match="MRL-1491"):
        config_to_evaluate(load_text(tmp_path, MINIMAL), [])
    with pytest.raises(ConfigError, match="MRL-1492"):
        config_to_evaluate(load_config(QUICKSTART, ["eval.bench_sets.held_out={data: builtin:carry}"]), [])


def test_the_newest_checkpoint_that_is_whole(tmp_path: Path) -> None:
    assert newest_good_step(tmp_path) == (None, [])
    for step in (2, 4, 6):
        save_layout(tmp_path, step, [[whole("a", numbers(3))]])
    assert newest_good_step(tmp_path) == (6, [])
    file = tmp_path / "step_000006" / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    step, wrong = newest_good_step(tmp_path)
    assert step == 4
    assert re.match(r"MRL-7003 the checkpoint of step 6 is damaged: rank_00000", wrong[0])
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000002", "step_000004", "step_000006"]
    with pytest.raises(MissingInputError, match="MRL-4201"):
        open_step(tmp_path, 3)


def test_results_appear_whole_and_beside_the_run(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"run.dir={tmp_path}"])
    first, second = new_directory(config), new_directory(config)
    assert first != second
    assert {first.parent, second.parent} == {tmp_path / "quickstart" / "eval"}
    write_whole(first / "deeper" / "result.json", {"a": 1})
    write_whole(first / "deeper" / "result.json", {"a": 2})
    assert json.loads((first / "deeper" / "result.json").read_text()) == {"a": 2}
    with pytest.raises(ValueError, match="JSON"):
        write_whole(first / "other.json", {"a": float("nan")})
    assert [path.name for path in first.rglob("*") if path.is_file()] == ["result.json"]


def test_the_table_has_a_row_for_every_score() -> None:
    metrics = {
        "bench/a/score/mean@2": 0.5, "bench/a/score/stderr@2": 0.125, "bench/a/score/best@2": 0.75,
        "bench/a/score/worst@2": 0.25, "bench/a/score/std@2": 0.25, "bench/a/format/mean@2": 1.0,
        "bench/a/failed_runs": 3, "bench/b/c/score/mean@1": 1.0, "bench/b/c/score/stderr@1": 0.0,
    }  # fmt: skip
    lines = evaluation_table(metrics, {"a": (10, 2), "b/c": (1000, 1)}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["a", "score", "2", "10", "0.5000", "±", "0.1250", "0.7500", "0.2500", "0.2500"],
        ["format", "2", "10", "1.0000", "-", "-", "-"],
        ["3", "failed"],
        ["b/c", "score", "1", "1,000", "1.0000", "±", "0.0000", "-", "-", "-"],
    ]


@pytest.mark.parametrize(
    ("best", "canonical"),
    [
        ("val/test_score/held_out", "eval/held_out/score/mean@1"),
        ("eval/held_out/score/mean@1", "eval/held_out/score/mean@1"),
        ("val/score/mean", "val/score/mean"),
    ],
)
def test_the_best_checkpoint_by_any_name_of_a_score(best: str, canonical: str, tmp_path: Path) -> None:
    config = load_text(tmp_path, QUICKSTART.read_text(), f"checkpoint.best_metric={best}")
    assert config.best_metric == canonical
