"""What trackers left behind, read back: points as ``{(name, step): [values, in order]}``."""

from __future__ import annotations

import json
import logging
import sqlite3
import struct
from collections import defaultdict
from pathlib import Path

Points = dict[tuple[str, int], list[float]]


def tensorboard_points(directory: Path) -> Points:
    """Scalars as TensorBoard shows them: what a START event takes back is gone."""
    accumulator = _accumulator(directory)
    points: Points = defaultdict(list)
    for tag in accumulator.Tags()["tensors"]:
        if _plugin(accumulator, tag) == "scalars":
            for event in accumulator.Tensors(tag):
                points[tag, event.step].append(float(event.tensor_proto.float_val[0]))
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            points[tag, event.step].append(event.value)
    return dict(points)


def tensorboard_texts(directory: Path) -> dict[str, list[str]]:
    accumulator = _accumulator(directory)
    return {
        tag: [event.tensor_proto.string_val[0].decode() for event in accumulator.Tensors(tag)]
        for tag in accumulator.Tags()["tensors"]
        if _plugin(accumulator, tag) == "text"
    }


def _plugin(accumulator, tag: str) -> str:
    return accumulator.SummaryMetadata(tag).plugin_data.plugin_name


def _accumulator(directory: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


def wandb_records(path: Path):
    """Records of a ``.wandb`` file: blocks of LevelDB's log format behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, block = path.read_bytes(), 32768
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = block - position % block
        if left < 7:
            position += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        if kind == 0:
            position += left
            continue
        position += 7
        whole += data[position : position + size]
        position += size
        if kind in (1, 4):  # full, last
            record = Record()
            record.ParseFromString(whole)
            yield record
            whole = b""


def wandb_points(path: Path) -> Points:
    points: Points = defaultdict(list)
    for record in wandb_records(path):
        if record.HasField("history"):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            step = row.pop("_step", record.history.step.num)
            for name, value in row.items():
                if not name.startswith("_"):
                    points[name, step].append(float(value))
    return dict(points)


def wandb_config(path: Path) -> dict:
    config: dict = {}
    for record in wandb_records(path):
        if record.HasField("run"):
            for update in record.run.config.update:
                config[update.key or update.nested_key[0]] = json.loads(update.value_json)
    return config


def swanlab_points(path: Path) -> Points:
    """Scalars of a ``.swanlab`` file."""
    import swanlab.proto.swanlab.record.v1.record_pb2 as record_pb2
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points: Points = defaultdict(list)
    reader = DataStoreReader()
    reader.open(str(path))
    for data in reader:
        record = record_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("scalar"):
            points[record.scalar.key, record.scalar.step].append(record.scalar.value.number)
    return dict(points)


def dashboard_points(log_dir: Path) -> Points:
    """Scalars as `swanlab watch` shows them, of the one experiment that there is."""
    with sqlite3.connect(log_dir / "runs.swanlab") as database:
        ((number, run),) = database.execute("select id, run_id from experiment").fetchall()
        tags = database.execute(
            "select name, folder from tag where type = 'line' and experiment_id = ?", (number,)
        ).fetchall()
    points: Points = defaultdict(list)
    for name, folder in tags:
        for file in sorted((log_dir / run / "logs" / folder).glob("*.log")):
            for line in file.read_text().splitlines():
                point = json.loads(line)
                points[name, point["index"]].append(point["data"])
    return dict(points)


def dashboard_groups(log_dir: Path) -> list[str]:
    with sqlite3.connect(log_dir / "runs.swanlab") as database:
        rows = database.execute(
            "select name from namespace where experiment_id is not null and id in (select namespace_id from display)"
            " order by id"
        ).fetchall()
    return [name for (name,) in rows]
