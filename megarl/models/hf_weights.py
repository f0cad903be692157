"""Weights in and out by their Hugging Face names, whatever the layout.

In: a source gives parts of tensors by name, and every rank reads only the parts that it keeps. Out: `export_weights`
walks the pipeline stages and yields buckets of whole tensors on every rank. In both directions no more than one bucket
of whole tensors exists at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from safetensors import SafetensorError, safe_open

from megarl.core import whereabouts
from megarl.core.errors import DataError, MissingInputError
from megarl.core.seeding import derive_seed
from megarl.core.world import Axis, World
from megarl.models.cuts import Parameter, Part, Shape
from megarl.models.parameter_table import VALUE_HEAD

# (Hugging Face name, shape of the whole tensor, wanted part) -> the part
WeightSource = Callable[[str, Shape, Part], torch.Tensor]

_BUCKET_BYTES = 64 * 2**20
# How value and reward models call their head.
_VALUE_HEADS = (VALUE_HEAD, "value_head.weight", "v_head.weight")


def random_weights(seed: int, initializer_range: float) -> WeightSource:
    """Matrices from N(0, range), norms one, biases and value heads zero.

    Each tensor is seeded by its own name, so every layout starts from the same bits.
    """

    def source(name: str, shape: Shape, part: Part) -> torch.Tensor:
        if name == VALUE_HEAD or name.endswith(".bias"):
            return part.of(torch.zeros(shape))
        if len(shape) == 1:
            return part.of(torch.ones(shape))
        generator = torch.Generator().manual_seed(derive_seed(seed, "initial weights", name))
        return part.of(torch.randn(shape, generator=generator) * initializer_range)

    return source


def safetensors_weights(directory: Path, setting: str = "model.path", *, fresh_head: bool = True) -> WeightSource:
    """Tensors of a local Hugging Face directory, one file or sharded. With ``fresh_head``, a value head that is not
    there starts at zero.

    ``setting`` is what named the directory, for errors.
    """
    files = _file_of_tensor(directory)

    def source(name: str, shape: Shape, part: Part) -> torch.Tensor:
        if name == VALUE_HEAD:
            name = next((known for known in _VALUE_HEADS if known in files), name)
        if name not in files:
            if name == VALUE_HEAD and fresh_head:
                return part.of(torch.zeros(shape))
            raise DataError(
                "MRL-2201", f"{setting}={str(directory)!r} has no tensor {name!r}; its config.json promises it."
            )
        with _opened(files[name]) as file:
            stored = file.get_slice(name)
            if tuple(stored.get_shape()) != shape:
                raise DataError(
                    "MRL-2202",
                    f"{files[name].name}: {name} has shape {tuple(stored.get_shape())}; config.json asks for {shape}.",
                )
            index = [slice(None)] * len(shape)
            index[part.dim] = slice(part.start, part.stop)
            tensor: torch.Tensor = stored[tuple(index)]
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
            f"{str(path.parent)!r}: there is no {path.name} in it.\n"
            "Weights are read from model.safetensors, or from the files that model.safetensors.index.json names.",
        )
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise DataError("MRL-2203", f"{path}: damaged or not a safetensors file ({error}).") from error


@torch.no_grad()
def import_weights(
    chunks: Sequence[torch.nn.Module], table: Iterable[Parameter], source: WeightSource, world: World
) -> None:
    """Fill this rank's parameters. Fails if the table and the model do not name the same parameters."""
    parameters = named_parameters(chunks)
    ours = own_entries(table, world)
    expected = {(entry.chunk, entry.name) for entry in ours}
    assert expected == parameters.keys(), f"parameter table and model differ: {sorted(expected ^ parameters.keys())}"
    for entry in ours:
        whereabouts.tick()
        axis = axis_of(entry, world)
        wanted = entry.cut.needed(entry.hf_shapes, axis.rank, axis.size)
        parts = [source(*each) for each in zip(entry.hf_names, entry.hf_shapes, wanted, strict=True)]
        parameter = parameters[entry.chunk, entry.name]
        parameter.copy_(entry.cut.join(parts, parameter.size(0)))
        # Megatron marks split weights while initialising them, which we told it not to do; biases it marks always.
        # Without the mark the gradient norm takes them for copies and counts the first rank's part only.
        split_dim = entry.cut.split_dim
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, split_dim is not None, split_dim or 0, 1)


def named_parameters(chunks: Sequence[torch.nn.Module]) -> dict[tuple[int, str], torch.nn.Parameter]:
    """This rank's parameters by chunk and name."""
    return {(i, name): parameter for i, chunk in enumerate(chunks) for name, parameter in chunk.named_parameters()}


def own_entries(table: Iterable[Parameter], world: World) -> list[Parameter]:
    """The entries of its stage's table that a rank has."""
    return [entry for entry in table if entry.ep_rank in (None, world.ep.rank)]


def axis_of(entry: Parameter, world: World) -> Axis:
    """The ranks that share the parameter."""
    return world.tp if entry.ep_rank is None else world.etp


@torch.no_grad()
def export_weights(
    chunks: Sequence[torch.nn.Module], tables: Sequence[Sequence[Parameter]], world: World
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Buckets of (Hugging Face name, whole tensor), the same on every rank.

    ``tables[s]`` is the table of pipeline stage ``s``. Collective: the generator must be run to its end on all ranks.
    """
    parameters = named_parameters(chunks)
    dtype = next(iter(parameters.values())).dtype
    for stage, table in enumerate(tables):
        for bucket in _buckets([entry for entry in table if entry.exported]):
            whereabouts.tick()
            if stage == world.pp.rank and bucket[0].ep_rank in (None, world.ep.rank):
                tensors = _join(bucket, parameters, axis_of(bucket[0], world))
            else:
                shapes = [shape for entry in bucket for shape in entry.hf_shapes]
                tensors = [torch.empty(shape, dtype=dtype, device=world.device) for shape in shapes]
            if bucket[0].ep_rank is not None and stage == world.pp.rank:
                tensors = _broadcast(tensors, world.ep, bucket[0].ep_rank)
            tensors = _broadcast(tensors, world.pp, stage)
            yield list(zip([name for entry in bucket for name in entry.hf_names], tensors, strict=True))


@torch.no_grad()
def take_exported(
    chunks: Sequence[torch.nn.Module], table: Iterable[Parameter], world: World, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Copy what this rank needs of one exported bucket. A model without some tensor (a value head) leaves it alone."""
    parameters = named_parameters(chunks)
    for entry in own_entries(table, world):
        if entry.hf_names[0] in tensors:
            axis = axis_of(entry, world)
            wanted = entry.cut.needed(entry.hf_shapes, axis.rank, axis.size)
            parts = [part.of(tensors[name]) for name, part in zip(entry.hf_names, wanted, strict=True)]
            parameter = parameters[entry.chunk, entry.name]
            parameter.copy_(entry.cut.join(parts, parameter.size(0)))


def _buckets(table: Sequence[Parameter]) -> Iterator[list[Parameter]]:
    """Consecutive entries of limited size, none of them mixing the experts of different ranks."""
    bucket: list[Parameter] = []
    num_bytes = 0
    for entry in sorted(table, key=lambda entry: -1 if entry.ep_rank is None else entry.ep_rank):
        size = 4 * entry.num_elements
        if bucket and (num_bytes + size > _BUCKET_BYTES or entry.ep_rank != bucket[0].ep_rank):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(entry)
        num_bytes += size
    if bucket:
        yield bucket


def _join(
    bucket: Sequence[Parameter], parameters: Mapping[tuple[int, str], torch.nn.Parameter], axis: Axis
) -> list[torch.Tensor]:
    """The whole tensors of a bucket, from the ranks that share them."""
    parts = _gather([parameters[entry.chunk, entry.name] for entry in bucket], axis)
    return [tensor for i, entry in enumerate(bucket) for tensor in entry.cut.whole([part[i] for part in parts])]


def _gather(tensors: Sequence[torch.Tensor], axis: Axis) -> list[list[torch.Tensor]]:
    """For every rank of the axis, its tensors; one all-gather for the whole list."""
    if axis.size == 1:
        return [[tensor.detach() for tensor in tensors]]
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    gathered = [torch.empty_like(flat) for _ in range(axis.size)]
    dist.all_gather(gathered, flat, group=axis.group)
    return [_unflatten(part, tensors) for part in gathered]


def _broadcast(tensors: list[torch.Tensor], axis: Axis, source: int) -> list[torch.Tensor]:
    """The tensors of the axis's rank ``source``, on all its ranks; one broadcast for the whole list."""
    if axis.size == 1:
        return tensors
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.broadcast(flat, group=axis.group, group_src=source)
    return _unflatten(flat, tensors)


def _unflatten(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]
