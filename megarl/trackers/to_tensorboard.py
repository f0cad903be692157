"""TensorBoard: event files, without torch.

TensorBoard keeps every point of every file, also two of one step. So a process that goes on after another begins its
file with a START event, on which readers forget all points from that step on.
"""

from __future__ import annotations

import json
import time as clock
from collections.abc import Iterable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from megarl.trackers.backend import Refused, TrackedRun, write_whole
from megarl.trackers.tail import Alert, LedgerLine, LedgerTail


class ToTensorBoard:
    """Writes one more event file, from the step after the last one that is in an earlier file."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        log_dir = run.kwargs.get("log_dir")
        self.directory = Path(log_dir) / run.config.run.name if log_dir else run.own_directory / "tensorboard"
        self._cursor = run.own_directory / "tensorboard.json"

    def start(self) -> int:
        last_step = self._last_written()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._path = self._next_path()
            self._file = RecordWriter(open(self._path, "xb"))  # noqa: SIM115  (closed by finish)
        except OSError as error:
            raise Refused(f"the log_dir {self.directory} cannot be written: {error.strerror}") from error
        first_step = max(0, last_step + 1)
        self._write(event_pb2.Event(wall_time=clock.time(), file_version="brain.Event:2"))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(event_pb2.Event(wall_time=clock.time(), step=first_step, session_log=start))
        settings = self._run.config.model_dump(mode="json")
        self._write_texts(
            first_step,
            clock.time(),
            {
                "config": f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```",
                "devices": _table(self._run.devices),
            },
        )
        return last_step

    def log(self, step: int, time: float, metrics: Mapping[str, float], alerts: Iterable[Alert]) -> None:
        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(event_pb2.Event(wall_time=time, step=step, summary=summary_pb2.Summary(value=values)))
        text = "\n".join(f"- **{alert.rule}** (severity {alert.severity}) {alert.message}" for alert in alerts)
        self._write_texts(step, time, {"alerts": text})

    def settle(self, last: LedgerLine | None) -> None:
        self._file.flush()
        if last is not None:
            cursor = {"step": last.step, "checksum": last.checksum, "file": str(self._path.absolute())}
            write_whole(self._cursor, json.dumps(cursor))

    def finish(self) -> None:
        self._file.close()

    def _last_written(self) -> int:
        """The last step in earlier files; -1 if they are gone or elsewhere, or if the ledger has another line for the
        step: the run was resumed before it.
        """
        if not self._cursor.is_file():
            return -1
        cursor = json.loads(self._cursor.read_bytes())
        file = Path(cursor["file"])
        if not file.is_file() or file.parent != self.directory.absolute():
            return -1
        found = ((line.step, line.checksum) for line in LedgerTail(self._run.ledger).read())
        step: int = cursor["step"]
        return step if (step, cursor["checksum"]) in found else -1

    def _next_path(self) -> Path:
        """Files are read in the order of their names, which hold a time in seconds: every file gets its own second."""
        now = int(clock.time())
        taken = [
            int(path.suffix[1:]) for path in self.directory.glob("events.out.tfevents.*") if path.suffix[1:].isdigit()
        ]
        second = next(second for second in count(max([now, *taken])) if second not in taken)
        return self.directory / f"events.out.tfevents.{second:010d}"

    def _write_texts(self, step: int, time: float, texts: Mapping[str, str]) -> None:
        values = [
            summary_pb2.Summary.Value(
                tag=name,
                metadata=summary_pb2.SummaryMetadata(
                    plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
                ),
                tensor=tensor_pb2.TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
            )
            for name, text in texts.items()
            if text
        ]
        if values:
            self._write(event_pb2.Event(wall_time=time, step=step, summary=summary_pb2.Summary(value=values)))

    def _write(self, event: event_pb2.Event) -> None:
        self._file.write(event.SerializeToString())


def _table(rows: list[dict[str, Any]]) -> str:
    """A Markdown table with a column for every key that occurs."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(key, "")) for key in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""
