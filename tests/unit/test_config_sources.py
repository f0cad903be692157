"""Lists of training data in the configuration: what is accepted, what is refused, and what `megarl check` misses."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.config.load import load_config
from megarl.config.preflight import require_inputs
from megarl.config.resolved import dump_resolved
from megarl.config.summary import summarise
from megarl.core.errors import MissingInputError
from tests.unit.config_files import MINIMAL, load_text, refusal

SEVERAL = MINIMAL.replace(
    "  train: builtin:carry\n",
    "  train:\n    - {path: builtin:carry, weight: 3, task: sums}\n    - builtin:sort\n    - path: rows.jsonl\n"
    "      prompt_key: question\n",
)


def test_sources_have_weights_tasks_and_keys(tmp_path: Path) -> None:
    first, second, third = load_text(tmp_path, SEVERAL).data.train
    assert (first.path, first.weight, first.task) == ("builtin:carry", 3, "sums")
    assert (second.path, second.weight, second.task) == ("builtin:sort", 1, None)
    assert (third.prompt_key, third.answer_key) == ("question", None)


@pytest.mark.parametrize("text", [MINIMAL, SEVERAL], ids=["one", "several"])
def test_what_ran_can_be_run_again(tmp_path: Path, text: str) -> None:
    config = load_text(tmp_path, text)
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config))
    assert load_config(tmp_path / "resolved.yaml") == config
    assert ("train: builtin:carry" in dump_resolved(config)) == (text == MINIMAL)


def test_the_check_shows_the_shares(tmp_path: Path) -> None:
    assert "builtin:carry 60.0%, builtin:sort 20.0%, rows.jsonl 20.0%" in summarise(load_text(tmp_path, SEVERAL))


def test_a_list_on_the_command_line(tmp_path: Path) -> None:
    config = load_text(tmp_path, MINIMAL, "data.train=[{path: a.jsonl, weight: 0.5}, b.parquet]")
    assert [(source.path, source.weight) for source in config.data.train] == [("a.jsonl", 0.5), ("b.parquet", 1.0)]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("{path: builtin:cary}", 'MRL-1004 run.yaml:21 data.train.0.path="builtin:cary" is not allowed.'),
        ("{path: a.jsonl, weight: 0}", "MRL-1004 run.yaml:21 data.train.0.weight=0 is not allowed."),
        ("{path: a.jsonl, weight: heavy}", 'MRL-1003 run.yaml:21 data.train.0.weight="heavy" is not allowed.'),
        ("{path: a.jsonl, wieght: 2}", "MRL-1001 run.yaml:21 data.train.0.wieght is not a setting. "
         "Did you mean data.train.0.weight?"),
        ("{weight: 2}", "MRL-1002 run.yaml:21 data.train.0.path is required but not given."),
        ("7", "MRL-1003 run.yaml:20 data.train=7 is not allowed. It must be a JSONL or Parquet file"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_source_is_named_with_its_line(tmp_path: Path, wrong: str, told: str) -> None:
    text = MINIMAL.replace("  train: builtin:carry\n", f"  train:\n    - {wrong}\n    - builtin:sort\n")
    assert refusal(tmp_path, text).startswith(told)


def test_no_source_at_all_is_refused(tmp_path: Path) -> None:
    assert "data.train=" in refusal(tmp_path, MINIMAL, "data.train=[]")


def test_every_missing_file_of_a_mixture_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.jsonl").touch()
    config = load_text(tmp_path, MINIMAL, "data.train=[here.jsonl, gone.jsonl, lost.jsonl]")
    with pytest.raises(MissingInputError) as caught:
        require_inputs(config)
    message = str(caught.value)
    assert 'MRL-4102 data.train.1.path="gone.jsonl": there is no such file.' in message
    assert "data.train.2.path" in message
    assert "here.jsonl" not in message
