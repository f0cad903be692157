"""Training files that change between two starts of a run: refused, unless the user names what they have become."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.config.schema import RunConfig
from megarl.core.errors import ConfigError
from megarl.run.changes import require_same_run
from tests.unit.test_resume_changes import load, progress

Load = Callable[..., RunConfig]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for path in (first, second):
        path.write_text('{"prompt": "1+1=", "answer": "2", "demonstration": "2"}\n')
    return first, second


@pytest.fixture
def load_both(files: tuple[Path, Path]) -> Load:
    first, second = files
    return lambda *overrides: load(f"data.train=[{first}, {{path: {second}, weight: 2}}, builtin:sort]", *overrides)


def test_only_the_file_that_changed_is_named(files: tuple[Path, Path], load_both: Load) -> None:
    before = progress(load_both())
    assert before.data_hashes.keys() == {str(path) for path in files}
    files[1].write_text("other\n")
    with pytest.raises(ConfigError, match="MRL-1502") as refused:
        require_same_run(load_both(), before)
    assert f"{files[1]}: was " in str(refused.value)
    assert str(files[0]) not in str(refused.value)


def test_the_printed_setting_accepts_this_content_and_no_other(files: tuple[Path, Path], load_both: Load) -> None:
    before = progress(load_both())
    files[1].write_text("other\n")
    with pytest.raises(ConfigError) as refused:
        require_same_run(load_both(), before)
    (printed,) = re.findall(r"""'(data\.accept_changed=\["[0-9a-f]{16}"\])'""", str(refused.value))
    told = require_same_run(load_both(printed), before)
    assert f"{files[1]}: another content, accepted" in told
    files[1].write_text("yet another\n")
    with pytest.raises(ConfigError, match="MRL-1502"):
        require_same_run(load_both(printed), before)


def test_once_it_is_in_a_checkpoint_nothing_has_to_be_accepted(files: tuple[Path, Path], load_both: Load) -> None:
    files[0].write_text("other\n")
    assert require_same_run(load_both(), progress(load_both())) == []


def test_weights_and_order_of_sources_stay_what_they_are(load_both: Load) -> None:
    before = progress(load_both())
    with pytest.raises(ConfigError, match=r"MRL-1501 .*\n *data\.train: was "):
        require_same_run(load("data.train=builtin:sort"), before)


@pytest.mark.parametrize("override", ["data.too_long=error", "data.bad_rows=skip", "data.max_bad_rows=7"])
def test_what_stops_a_run_may_change(load_both: Load, override: str) -> None:
    (told,) = require_same_run(load_both(override), progress(load_both()))
    assert told.startswith(override.partition("=")[0])
