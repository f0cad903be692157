"""SwanLab's local dashboard: the same files and tables as its own callback writes, in groups and much faster.

SwanLab's callback puts all charts into one group and asks the database before every point. This one is for exactly the
pinned version of SwanLab: it works with that version's internals.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any

from swanboard.db.models import Chart, Experiment, Namespace
from swanlab.deprecated import local

from megarl.trackers.sinks import GROUPS

_OPEN_GROUPS = ("critic", "actor", "eval")


class _Column(local._ColumnInfo):  # type: ignore[misc]  # untyped
    """A chart in the group that its name begins with, behind the groups that are already there."""

    def __init__(self, key: str, kid: str, chart_type: Any) -> None:
        super().__init__(key, kid, chart_type)
        self.section_name = key.partition("/")[0]
        self.section_sort = None


class Board(local.LocalCallbacker):  # type: ignore[misc]  # untyped
    """Writes the points of a run to where `swanlab watch` looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = Lock()  # points are flushed in a thread of SwanLab's
        self._failure: Exception | None = None

    @property
    def name(self) -> str:
        return "megarl-board"

    def on_run_initialized(self, run_dir: Path, path: str, settings: Any, *_: Any, **__: Any) -> None:
        """The dashboard shows groups in the order in which they were made, and only those that have charts.

        It loads every chart of an open group, so only the groups that people look at first are open.
        """
        super().on_run_initialized(run_dir, path, settings)
        for group in GROUPS:
            Namespace.create(name=group, experiment_id=self.exp.id)
        others = (Namespace.experiment_id == self.exp.id) & Namespace.name.not_in(_OPEN_GROUPS)
        Namespace.update(opened=0).where(others).execute()

    def raise_failure(self) -> None:
        """SwanLab swallows what its callbacks raise; here it comes out, and the process starts over from the ledger."""
        if self._failure is not None:
            raise self._failure

    def on_scalar_flush(self, scalar_records: list[Any], *_: Any, **__: Any) -> None:
        """Many points at once: the charts in one transaction, each metric's points in one write."""
        try:
            self._flush(scalar_records)
        except Exception as error:
            self._failure = self._failure or error
            raise

    def _flush(self, scalar_records: list[Any]) -> None:
        by_name: dict[str, list[Any]] = defaultdict(list)
        for record in scalar_records:
            by_name[record.key].append(record)
        new = [records[0] for name, records in by_name.items() if name not in self._metrics]
        local._ColumnInfo = _Column
        with self._lock, Experiment._meta.database.atomic("IMMEDIATE"):
            for record in new:
                self._create_column(record, self._get_metric_context(record, scalar=True))
        for name, records in by_name.items():
            self._append(self._metrics[name], records)

    def forget_earlier(self, run_id: str, name: str) -> None:
        """Take what earlier processes wrote of this run off the dashboard, and the run's name back."""
        earlier = Experiment.run_id.endswith(f"-{run_id}") & (Experiment.id != self.exp.id)
        with self._lock, Experiment._meta.database.atomic("IMMEDIATE"):
            directories = [row.run_id for row in Experiment.select().where(earlier)]
            Experiment.delete().where(earlier).execute()
            for chart in Chart.select().where(Chart.project_id.is_null(False)):
                if chart.sources.count() == 0:  # it compared the earlier ones with each other
                    chart.delete_instance()
            self.exp.name = name
            self.exp.save()
        for directory in directories:
            shutil.rmtree(self._run_dir.parent / directory, ignore_errors=True)

    def _append(self, metric: Any, records: Iterable[Any]) -> None:
        lines: dict[Path, list[str]] = defaultdict(list)
        for record in records:
            point, _, path = metric.add(int(record.step), record.value.number, self._record_time(record))
            lines[path].append(json.dumps(point) + "\n")
        directory = self._swanlog_dir / metric.kid
        directory.mkdir(exist_ok=True)
        (directory / "_summary.json").write_text(json.dumps(metric.summary))
        for path, added in lines.items():
            with open(self._swanlog_dir / path, "a", encoding="utf-8") as file:
                file.writelines(added)
