"""Every row exactly once per epoch, whatever kills the run. (`tools/kill_epochs.py` kills it ten times.)"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.epochs import NUM_EPOCHS, epochs_drawn, train_with_kills, write_rows


@pytest.mark.slow
def test_killed_runs_draw_every_row_once_per_epoch(tmp_path: Path) -> None:
    ids = write_rows(tmp_path / "rows.jsonl")
    # in the middle of a step that no checkpoint holds, and in the middle of a save
    assert train_with_kills(tmp_path, ["step/update:0:17=kill", "save/before-rename:0:27=kill"]) == 2
    assert epochs_drawn(tmp_path) == [dict.fromkeys(ids, 1)] * NUM_EPOCHS
