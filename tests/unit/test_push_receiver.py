"""What a receiver is told is checked; after a failure the engine does not serve until a whole update has come."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.core.bucket import SHARED_MEMORY, lay_out, pack, recut
from megarl.core.engine_fault import EngineFault
from megarl.weights.disk import DiskRoad
from megarl.weights.memory_file import MemoryFile
from megarl.weights.tensor import TensorRoad
from tests.unit.embedded_models import make_model
from tests.unit.one_rank import one_rank_world
from tests.unit.push_servers import Pusher, pusher, running_servers

NAME = "model.norm.weight"
GOOD = {"name": NAME, "dtype": "float32", "shape": [32], "offset": 0}


@pytest.fixture(scope="module")
def trainer() -> Iterator[Pusher]:
    with (
        one_rank_world() as world,
        running_servers(1, make_model("qwen3")) as servers,
        pusher(list(servers), TensorRoad(20), world) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def memory() -> Iterator[MemoryFile]:
    made = MemoryFile(4096)
    yield made
    made.close()


def control(trainer: Pusher, route: str, **body: Any) -> Any:
    client = next(iter(trainer.clients.values()))
    return trainer.loop.run(client.control(route, body, 20))


def update(trainer: Pusher, path: str, pieces: Any, **more: Any) -> Any:
    manifest = {"path": path, "num_bytes": 4096, "pieces": pieces}
    return control(trainer, "/update_weights_from_tensor", load_format=SHARED_MEMORY, manifest=manifest, **more)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"name": "model.nothing.weight"}, "MRL-5102"),
        ({"shape": [4, 8]}, "MRL-5103"),
        ({"shape": [33]}, "MRL-5103"),
        ({"shape": [4096]}, "there are 4096"),
        ({"shape": [-32]}, "shape must be"),
        ({"shape": [2**39, 2**39]}, "shape must be"),
        ({"shape": [True]}, "shape must be"),
        ({"dtype": "float64"}, "dtype must be"),
        ({"dtype": "bfloat16", "shape": [64]}, "MRL-5103"),
        ({"offset": -64}, "offset must be"),
        ({"offset": 4032}, "there are 4096"),
        ({"offset": 3}, "begins at byte 3"),
        ({"name": 5}, "name must be"),
        ({"extra": 5}, "must have name"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(
    change: dict[str, Any], told: str, trainer: Pusher, memory: MemoryFile
) -> None:
    control(trainer, "/begin_weight_update")
    with pytest.raises(EngineFault, match=told):
        update(trainer, memory.path, [GOOD | change])


def test_only_memory_files_are_read(trainer: Pusher, memory: MemoryFile, tmp_path: Path) -> None:
    control(trainer, "/begin_weight_update")
    link, plain = tmp_path / "link", tmp_path / "plain"
    link.symlink_to(memory.path)
    plain.write_bytes(bytes(4096))
    unsealed = os.memfd_create("megarl-weights")
    os.ftruncate(unsealed, 4096)
    with plain.open("rb") as file:
        paths = [str(link), str(plain), "/etc/passwd", f"/proc/{os.getpid()}/fd/{file.fileno()}", "/proc/1/fd/../../x"]
        for path in [*paths, f"/proc/{os.getpid()}/fd/{unsealed}"]:
            with pytest.raises(EngineFault, match=r"memory fil|not sealed"):
                update(trainer, path, [GOOD])
    os.close(unsealed)


def test_nothing_is_unpickled(trainer: Pusher) -> None:
    control(trainer, "/begin_weight_update")
    with pytest.raises(EngineFault, match="load_format must be"):
        control(trainer, "/update_weights_from_tensor", serialized_named_tensors=["gASVAAAA"], load_format=None)


def test_an_update_that_is_not_whole_never_serves(trainer: Pusher, memory: MemoryFile) -> None:
    trainer.transport.push(1)
    url = next(iter(trainer.clients))
    control(trainer, "/begin_weight_update")
    norm = torch.ones(32)
    pieces, _ = lay_out([(NAME, norm)])
    pack([(NAME, norm)], pieces, memory.bytes)
    update(trainer, memory.path, [piece.tree() for piece in pieces])
    with pytest.raises(EngineFault, match="weight_version"):
        control(trainer, "/end_weight_update")
    update(trainer, memory.path, [piece.tree() for piece in pieces], weight_version="2")
    with pytest.raises(EngineFault, match="MRL-5104"):
        control(trainer, "/end_weight_update")
    with pytest.raises(EngineFault, match="MRL-5105"):
        trainer.arrived(url)
    # one that begins anew has to bring again what the one before brought
    control(trainer, "/begin_weight_update")
    rest = [(name, tensor) for bucket in trainer.export() for name, tensor in bucket if name != NAME]
    for bucket, is_last in recut([rest], 1 << 30):
        pieces, num_bytes = lay_out(bucket)
        large = MemoryFile(num_bytes)
        pack(bucket, pieces, large.bytes)
        update(trainer, large.path, [piece.tree() for piece in pieces], weight_version="3" if is_last else None)
        large.close()
    with pytest.raises(EngineFault, match="1 parameters are of an update that failed"):
        control(trainer, "/end_weight_update")
    trainer.transport.push(4)
    assert trainer.verdicts.of[url] == (4, None)
    assert trainer.arrived(url) == trainer.checksum


def damage(directory: Path, how: str) -> None:
    file = sorted(directory.glob("*.safetensors"))[-1]
    content = bytearray(file.read_bytes())
    if how == "one bit":
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "truncated":
        file.write_bytes(content[:-5])
    elif how == "missing":
        file.unlink()
    elif how == "link":
        file.rename(directory / "elsewhere")
        file.symlink_to("elsewhere")
    else:
        manifest = directory / "megarl_manifest.json"
        manifest.write_text(manifest.read_text().replace(file.name, "../" + file.name))


@pytest.mark.parametrize("how", ["one bit", "truncated", "missing", "link", "a path in the manifest"])
def test_damaged_files_are_refused_before_anything_changes(how: str, trainer: Pusher, tmp_path: Path) -> None:
    trainer.transport.push(5)
    url, before = next(iter(trainer.clients)), trainer.checksum
    road = DiskRoad(tmp_path, trainer.model.config.to_dict(), 20, 20_000)
    for bucket, _ in recut(trainer.export(), road.bucket_bytes):
        road.load([(name, tensor * 2) for name, tensor in bucket], [])
    trainer.loop.run(road.carry(None, [], "6"))
    damage(tmp_path / "version_6", how)
    with pytest.raises(EngineFault, match="refused"):
        control(trainer, "/update_weights_from_disk", model_path=str(tmp_path / "version_6"), weight_version="6")
    assert trainer.arrived(url) == before


def test_groups_are_checked(trainer: Pusher) -> None:
    control(trainer, "/begin_weight_update")
    meeting = {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g",
        "backend": "gloo",
    }  # fmt: skip
    for change, told in [
        ({"rank_offset": 2}, "and rank_offset"),
        ({"backend": "mpi"}, "gloo"),
        ({"master_port": 0}, "master_port"),
    ]:
        with pytest.raises(EngineFault, match=told):
            control(trainer, "/init_weights_update_group", **(meeting | change))
    with pytest.raises(EngineFault, match="no such group"):
        control(trainer, "/update_weights_from_distributed", group_name="g", names=[], dtypes=[], shapes=[])
    with pytest.raises(EngineFault, match="does not exist"):
        control(trainer, "/destroy_weights_update_group", group_name="g")
