"""What `megarl train` finds in a run directory decides what it does, before any rank is started."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.checkpoint.store import CheckpointStore
from megarl.config.load import load_config
from megarl.config.schema import CheckpointSettings, RunConfig
from megarl.core.errors import ConfigError, RunDirInUseError, StorageError
from megarl.core.world import World
from megarl.run.checkpoints import SavePlan
from megarl.run.directory import num_restarts
from megarl.run.progress import Best, last_step_of
from megarl.run.resume import open_record, require_none_damaged, take_up
from tests.unit.one_rank import one_rank_world
from tests.unit.test_resume_changes import CONFIGS, progress


def line(step: int) -> str:
    """A step of a ledger."""
    metrics = {"system/samples": 16 * step, "timing_s/step_wall": 1.5, "eval/a/score/mean@1": step}
    return json.dumps({"step": step, "time": 2.0, "metrics": metrics}) + "\n"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with one_rank_world() as world:
        yield world


def load(directory: Path, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / "quickstart.yaml", [f"run.dir={directory}", *overrides])


def begin(config: RunConfig) -> Path:
    """A directory as a run leaves it that was killed at once."""
    directory = take_up(config, fresh=False)
    assert directory is not None
    directory.release()
    return directory.path


def save(world: World, config: RunConfig, path: Path, step: int) -> None:
    """A checkpoint that holds only what is plain data, and the ledger up to it."""
    text = "".join(line(n) for n in range(step + 1))
    (path / "metrics.jsonl").write_text(text)
    tree = progress(config, step).to_tree() | {"ledger_bytes": len(text)}
    CheckpointStore(path / "checkpoints", world, keep=5).save(step, [], tree, {"x": torch.zeros(1)}, wait=True)


def test_a_run_that_was_begun_is_taken_up_where_it_is(tmp_path: Path, world: World) -> None:
    config = load(tmp_path)
    path = begin(config)
    save(world, config, path, 7)
    again = take_up(config, fresh=False)
    assert again is not None
    assert again.path == path
    with pytest.raises(RunDirInUseError, match="MRL-6001"):
        take_up(config, fresh=False)
    again.release()
    assert num_restarts(path) == 1
    assert not (tmp_path / "quickstart.1").exists()


def test_fresh_moves_the_old_run_aside(tmp_path: Path, world: World) -> None:
    config = load(tmp_path)
    save(world, config, begin(config), 7)
    fresh = take_up(load(tmp_path, "run.seed=5"), fresh=True)
    assert fresh is not None
    fresh.release()
    assert list((tmp_path / "quickstart.1" / "checkpoints").iterdir())
    assert not fresh.checkpoints.exists()
    assert num_restarts(fresh.path) == 0
    assert load_config(fresh.resolved_config).run.seed == 5


def test_a_finished_run_says_so(tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]) -> None:
    config = load(tmp_path)
    path = begin(config)
    save(world, config, path, last_step_of(config))
    assert take_up(config, fresh=False) is None
    printed = capsys.readouterr().out
    assert f"all {last_step_of(config)} steps are done" in printed
    assert "Summary" in printed
    assert take_up(config, fresh=False) is None, "the directory was released"
    longer = take_up(load(tmp_path, "run.num_steps=999"), fresh=False)
    assert longer is not None
    longer.release()
    assert "run.num_steps: was 40, is 999" in capsys.readouterr().out


def test_a_refused_change_leaves_everything_as_it_was(tmp_path: Path, world: World) -> None:
    config = load(tmp_path)
    path = begin(config)
    save(world, config, path, 7)
    with pytest.raises(ConfigError, match="MRL-1501"):
        take_up(load(tmp_path, "run.seed=5"), fresh=False)
    assert load_config(path / "resolved.yaml") == config
    assert num_restarts(path) == 0
    take_up(config, fresh=False).release()  # type: ignore[union-attr]


def test_a_damaged_manifest_does_not_hide_the_one_before(
    tmp_path: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load(tmp_path)
    path = begin(config)
    save(world, config, path, 7)
    save(world, config, path, last_step_of(config))
    (path / "checkpoints" / f"step_{last_step_of(config):06d}" / "manifest.json").write_text("{}")
    directory = take_up(load(tmp_path, "checkpoint.keep=3"), fresh=False)
    assert directory is not None
    directory.release()
    assert "Changed since step 7: checkpoint.keep: was 2, is 3" in capsys.readouterr().out


def test_nothing_but_damaged_checkpoints_is_no_reason_to_start_over(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    require_none_damaged(tmp_path)
    (tmp_path / "checkpoints" / "step_000007.bad").mkdir()
    with pytest.raises(StorageError, match=r"MRL-7301 .*step_000007\.bad"):
        require_none_damaged(tmp_path)


def test_the_record_goes_on_behind_the_checkpoint(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    config = load(tmp_path)
    path = begin(config)
    save(world, config, path, 7)
    checkpoint = CheckpointStore(path / "checkpoints", world, keep=5).open_newest()
    with (path / "metrics.jsonl").open("a") as ledger:
        ledger.write(line(8) + '{"step":9,')
    recorder, history = open_record(config, path, checkpoint, devices=[])
    recorder.finish()
    assert [json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()] == list(range(8))
    assert history.wall_seconds == 8 * 1.5
    assert history.scores["a"][-1] == (7, 7.0)
    assert caplog.records == []
    (path / "metrics.jsonl").write_text(line(0))
    open_record(config, path, checkpoint, devices=[])[0].finish()
    assert "was changed since step 7" in caplog.text


def test_a_run_without_a_checkpoint_starts_with_an_empty_record(tmp_path: Path) -> None:
    config = load(tmp_path)
    path = begin(config)
    (path / "metrics.jsonl").write_text(line(0) + line(1))
    recorder, history = open_record(config, path, None, devices=[])
    recorder.finish()
    assert (path / "metrics.jsonl").read_bytes() == b""
    assert history.wall_seconds == 0


def test_when_a_step_is_saved() -> None:
    plan = SavePlan(CheckpointSettings(every=4), last_step=10)
    assert [step for step in range(1, 11) if plan.is_due(step)] == [4, 8, 10]
    assert [step for step in range(1, 11) if SavePlan(CheckpointSettings(every=0), 10).is_due(step)] == [10]


def test_the_best_checkpoint() -> None:
    highest = SavePlan(CheckpointSettings(best_metric="a"), 10, "a")
    lowest = SavePlan(CheckpointSettings(best_metric="a", best_mode="min"), 10, "a")
    steps = [(2, {"a": 0.5}), (4, {"a": 0.9}), (6, {"b": 9.0}), (8, {"a": 0.1}), (10, {"a": float("nan")})]
    for plan, expected in ((highest, Best(4, 0.9)), (lowest, Best(8, 0.1))):
        best = None
        for step, metrics in steps:
            best = plan.better(best, step, metrics)
        assert best == expected
    assert SavePlan(CheckpointSettings(), 10).better(None, 2, {"a": 1.0, "": 2.0}) is None
