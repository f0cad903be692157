"""Weights in and out by their Hugging Face names, whatever the layout.

In: a source gives whole tensors by name, and every rank keeps its part. Out: `export_weights` walks the pipeline
stages and yields buckets of whole tensors on every rank; no more than one bucket of whole tensors exists at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from safetensors import SafetensorError, safe_open

from megarl.core.errors import DataError, MissingInputError
from megarl.core.seeding import derive_seed
from megarl.core.world import World
from megarl.models.parameter_table import VALUE_HEAD, Parameter

# (Hugging Face name, shape) -> whole tensor
WeightSource = Callable[[str, tuple[int, ...]], torch.Tensor]

_BUCKET_BYTES = 64 * 2**20


def random_weights(seed: int, initializer_range: float) -> WeightSource:
    """Matrices from N(0, range), norms one, biases and value heads zero.

    Each tensor is seeded by its own name, so every layout starts from the same bits.
    """

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name == VALUE_HEAD or name.endswith(".bias"):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        generator = torch.Generator().manual_seed(derive_seed(seed, "initial weights", name))
        return torch.randn(shape, generator=generator) * initializer_range

    return source


def safetensors_weights(directory: Path) -> WeightSource:
    """Tensors of a local Hugging Face directory, one file or sharded. A value head that is not there starts at zero."""
    files = _file_of_tensor(directory)

    def source(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in files:
            if name == VALUE_HEAD:
                return torch.zeros(shape)
            raise DataError(
                "MRL-2201", f"model.path={str(directory)!r} has no tensor {name!r}; its config.json promises it."
            )
        with _opened(files[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise DataError(
                "MRL-2202", f"{files[name].name}: {name} has shape {tuple(tensor.shape)}; config.json asks for {shape}."
            )
        return tensor

    return source


def _file_of_tensor(directory: Path) -> dict[str, Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            # only names inside the directory: an index must not point anywhere else
            return {name: directory / Path(file).name for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError("MRL-2203", f"{index}: not an index of safetensors files ({error!r}).") from error
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise MissingInputError(
            "MRL-4002",
            f"model.path={str(path.parent)!r}: there is no {path.name} in it.\n"
            "Weights are read from model.safetensors, or from the files that model.safetensors.index.json names.",
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError("MRL-2203", f"{path}: damaged or not a safetensors file ({error}).") from error


@torch.no_grad()
def import_weights(model: torch.nn.Module, table: list[Parameter], source: WeightSource, world: World) -> None:
    """Fill this rank's parameters. Fails if the table and the model do not name the same parameters."""
    parameters = dict(model.named_parameters())
    expected = {entry.name for entry in table}
    assert expected == parameters.keys(), f"parameter table and model differ: {sorted(expected ^ parameters.keys())}"
    for entry in table:
        whole = [source(name, shape) for name, shape in zip(entry.hf_names, entry.hf_shapes, strict=True)]
        parameter = parameters[entry.name]
        parameter.copy_(entry.cut.local(whole, world.tp.rank, world.tp.size))
        # Megatron marks split weights while initialising them, which we told it not to do; biases it marks always.
        # Without the mark the gradient norm takes them for copies and counts the first rank's part only.
        split_dim = entry.cut.split_dim
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, split_dim is not None, split_dim or 0, 1)


@torch.no_grad()
def export_weights(
    model: torch.nn.Module, tables: list[list[Parameter]], world: World
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of (Hugging Face name, whole tensor), the same on every rank.

    ``tables[s]`` is the table of pipeline stage ``s``. Collective over the model-parallel ranks of one replica: the
    generator must be run to its end on all of them.
    """
    parameters = dict(model.named_parameters())
    for stage, table in enumerate(tables):
        for bucket in _buckets([entry for entry in table if entry.exported]):
            if stage == world.pp.rank:
                parts = _gather_over_tp([parameters[entry.name] for entry in bucket], world)
                tensors = [
                    tensor for i, entry in enumerate(bucket) for tensor in entry.cut.whole([part[i] for part in parts])
                ]
            else:
                shapes = [shape for entry in bucket for shape in entry.hf_shapes]
                dtype = next(iter(parameters.values())).dtype
                tensors = [torch.empty(shape, dtype=dtype, device=world.device) for shape in shapes]
            tensors = _broadcast_over_pp(tensors, stage, world)
            yield list(zip([name for entry in bucket for name in entry.hf_names], tensors, strict=True))


def _buckets(table: list[Parameter]) -> Iterator[list[Parameter]]:
    bucket: list[Parameter] = []
    num_bytes = 0
    for entry in table:
        size = sum(4 * torch.Size(shape).numel() for shape in entry.hf_shapes)
        if bucket and num_bytes + size > _BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(entry)
        num_bytes += size
    if bucket:
        yield bucket


def _gather_over_tp(tensors: list[torch.Tensor], world: World) -> list[list[torch.Tensor]]:
    """For every tensor-parallel rank, its tensors; one all-gather for the whole list."""
    if world.tp.size == 1:
        return [[tensor.detach() for tensor in tensors]]
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(world.tp.size)]
    dist.all_gather(gathered, flat, group=world.tp.group)
    return [_unflatten(part, tensors) for part in gathered]


def _broadcast_over_pp(tensors: list[torch.Tensor], stage: int, world: World) -> list[torch.Tensor]:
    """The owning stage's tensors, on every stage; one broadcast for the whole list."""
    if world.pp.size == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, group=world.pp.group, group_src=stage)
    return _unflatten(flat, tensors)


def _unflatten(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
